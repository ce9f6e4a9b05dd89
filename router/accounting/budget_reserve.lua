-- KEYS: the settlement's mark, then for each account the day's and the month's costs, reservations, and their ends.
-- ARGV: the time until which the caller waits for the answer, id (empty: only look), engine and money asked for, day, month,
-- lease, a new random name, for how long a day's and a month's costs are kept, then for each account four limits (-1: none):
-- engine and money of the day, of the month; and what was last seen of the day and of the month: name, engine, money.
-- Answers the time by Redis' clock, the number of the limit that would be broken (0: none; -1: too late), then for each
-- account what was used of each, and what was spent of the day and of the month: name, engine, money. Leases are by Redis'
-- clock.
local id, engine, money, day, month = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
if now > tonumber(ARGV[1]) then return {tostring(now), -1} end
local ends = now + tonumber(ARGV[7])
local denied, answer, count = 0, {tostring(now), 0}, (#KEYS - 1) / 4
for n = 0, count - 1 do
  local held, lease, first = KEYS[4 + 4 * n], KEYS[5 + 4 * n], 10 + 10 * n
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', lease, '-inf', '(' .. now)) do
    redis.call('HDEL', held, old)
    redis.call('ZREM', lease, old)
  end
  local used, spent = {}, {}
  for which = 0, 1 do
    local seen = first + 4 + 3 * which
    local e, m, ledger =
      spent_of(KEYS[2 + 4 * n + which], ARGV[8], ARGV[seen + 1], ARGV[seen + 2], ARGV[seen + 3], ARGV[9 + which])
    used[1 + 2 * which], used[2 + 2 * which] = e, m
    spent[#spent + 1] = ledger
    spent[#spent + 1] = string.format('%.0f', e)
    spent[#spent + 1] = string.format('%.0f', m)
  end
  for _, each in ipairs(redis.call('HVALS', held)) do
    local e, m, d, mo = each:match('^(%d+) (%d+) (%S+) (%S+)$')
    if d == day then used[1], used[2] = used[1] + tonumber(e), used[2] + tonumber(m) end
    if mo == month then used[3], used[4] = used[3] + tonumber(e), used[4] + tonumber(m) end
  end
  for which = 1, 4 do
    local most = tonumber(ARGV[first + which])
    answer[#answer + 1] = string.format('%.0f', used[which])
    if denied == 0 and most >= 0 and used[which] + (which % 2 == 1 and engine or money) > most then
      denied = 4 * n + which
    end
  end
  for _, each in ipairs(spent) do answer[#answer + 1] = each end
end
answer[2] = denied
if id ~= '' and denied == 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  for n = 0, count - 1 do
    redis.call('HSET', KEYS[4 + 4 * n], id, ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. day .. ' ' .. month)
    redis.call('ZADD', KEYS[5 + 4 * n], ends, id)
  end
end
return answer
