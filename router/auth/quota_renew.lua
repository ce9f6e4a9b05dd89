-- KEYS: places. ARGV: lease, 'restore' or '', places. Without 'restore' a place that is not held is not held again: it
-- may have been given back meanwhile.
local time = redis.call('TIME')
local ends = tonumber(time[1]) + tonumber(time[2]) / 1e6 + tonumber(ARGV[1])
for n = 3, #ARGV do
  if ARGV[2] == 'restore' then
    redis.call('ZADD', KEYS[1], ends, ARGV[n])
  else
    redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[n])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
