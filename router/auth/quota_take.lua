-- KEYS: counts, places. ARGV: requests, tokens and concurrent limit (-1: none), tokens asked, place, window, lease,
-- and the time until which the caller waits for the answer. Answers the fields of QuotaState, and the time by Redis' clock.
-- That clock counts, so that routers whose clocks differ agree. If it was set back, counts of future seconds count as used
-- just now, and a place ends with its lease.
local time = redis.call('TIME')
local second, now = tonumber(time[1]), tonumber(time[1]) + tonumber(time[2]) / 1e6
if now > tonumber(ARGV[8]) then return {'late', 0, 0, '0', second, tostring(now)} end
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])}
local asked, window = tonumber(ARGV[4]), tonumber(ARGV[6])
local flat = redis.call('HGETALL', KEYS[1])
local found, old, used = {}, {}, {0, 0}
for i = 1, #flat, 2 do
  local at, kind = flat[i]:match('^(%d+)([rt])$')
  at = tonumber(at)
  if at < second - window then
    old[#old + 1] = flat[i]
  else
    local which, amount = kind == 'r' and 1 or 2, tonumber(flat[i + 1])
    if at > second then
      redis.call('HINCRBY', KEYS[1], second .. kind, amount)
      old[#old + 1], at = flat[i], second
    end
    used[which] = used[which] + amount
    found[#found + 1] = {at, which, amount}
  end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
for _, place in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now + tonumber(ARGV[7]), 'inf')) do
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[7]), place)
end
local places = redis.call('ZCARD', KEYS[2])
local denied, wait = '', second + window + 1 - now
local function wait_for(which, excess)
  table.sort(found, function(a, b) return a[1] < b[1] end)
  for _, entry in ipairs(found) do
    if entry[2] == which then
      excess = excess - entry[3]
      if excess <= 0 then return entry[1] + window + 1 - now end
    end
  end
  return window
end
if limits[3] >= 0 and places >= limits[3] then
  denied, wait = 'concurrent', 1
elseif limits[1] >= 0 and used[1] >= limits[1] then
  denied, wait = 'requests', wait_for(1, used[1] + 1 - limits[1])
elseif limits[2] >= 0 and used[2] + asked > limits[2] then
  denied, wait = 'tokens', wait_for(2, used[2] + asked - limits[2])
else
  redis.call('HINCRBY', KEYS[1], second .. 'r', 1)
  redis.call('HINCRBY', KEYS[1], second .. 't', asked)
  redis.call('EXPIRE', KEYS[1], window + 2)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[7]), ARGV[5])
  redis.call('EXPIRE', KEYS[2], tonumber(ARGV[7]))
  used = {used[1] + 1, used[2] + asked}
end
return {denied, used[1], used[2], tostring(wait), second, tostring(now)}
