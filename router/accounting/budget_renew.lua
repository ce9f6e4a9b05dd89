-- KEYS: an account's reservations, and their ends. ARGV: lease, 'restore' or '', then for each reservation its id and what
-- budget_reserve.lua keeps of it. Without 'restore' one that is not held is not held again: it may have been settled
-- meanwhile.
local time = redis.call('TIME')
local ends = tonumber(time[1]) + tonumber(time[2]) / 1e6 + tonumber(ARGV[1])
for n = 3, #ARGV, 2 do
  if ARGV[2] == 'restore' then
    redis.call('HSET', KEYS[1], ARGV[n], ARGV[n + 1])
    redis.call('ZADD', KEYS[2], ends, ARGV[n])
  else
    redis.call('ZADD', KEYS[2], 'XX', ends, ARGV[n])
  end
end
