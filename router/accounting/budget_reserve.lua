-- KEYS: the settlement's mark, then for each account the day's and the month's costs, reservations, and their ends.
-- ARGV: id (empty: only look), engine and money asked for, day, month, lease, then for each account four limits (-1: none):
-- engine and money of the day, of the month. Answers the number of the limit that would be broken (0: none), then for each
-- account what was used of each. Leases are by Redis' clock.
local id, engine, money, day, month = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local ends = now + tonumber(ARGV[6])
local denied, answer, count = 0, {0}, (#KEYS - 1) / 4
for n = 0, count - 1 do
  local held, lease = KEYS[4 + 4 * n], KEYS[5 + 4 * n]
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', lease, '-inf', '(' .. now)) do
    redis.call('HDEL', held, old)
    redis.call('ZREM', lease, old)
  end
  local used = {}
  for which = 0, 1 do
    local spent = redis.call('HMGET', KEYS[2 + 4 * n + which], 'engine_us', 'money_u')
    used[1 + 2 * which], used[2 + 2 * which] = tonumber(spent[1] or 0), tonumber(spent[2] or 0)
  end
  for _, each in ipairs(redis.call('HVALS', held)) do
    local e, m, d, mo = each:match('^(%d+) (%d+) (%S+) (%S+)$')
    if d == day then used[1], used[2] = used[1] + tonumber(e), used[2] + tonumber(m) end
    if mo == month then used[3], used[4] = used[3] + tonumber(e), used[4] + tonumber(m) end
  end
  for which = 1, 4 do
    local most = tonumber(ARGV[6 + 4 * n + which])
    answer[#answer + 1] = string.format('%.0f', used[which])
    if denied == 0 and most >= 0 and used[which] + (which % 2 == 1 and engine or money) > most then
      denied = 4 * n + which
    end
  end
end
answer[1] = denied
if id ~= '' and denied == 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  for n = 0, count - 1 do
    redis.call('HSET', KEYS[4 + 4 * n], id, ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. day .. ' ' .. month)
    redis.call('ZADD', KEYS[5 + 4 * n], ends, id)
  end
end
return answer
