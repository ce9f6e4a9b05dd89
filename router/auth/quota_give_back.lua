-- KEYS: counts, places. ARGV: second ('': the one in which the place was taken), requests, tokens (below 0: used
-- beyond what was taken, just now), place, expiry, lease. A second call for the same place gives nothing back, so a caller who
-- does not know whether the first one counted may repeat it.
local expires = redis.call('ZSCORE', KEYS[2], ARGV[4])
if not expires then return end
redis.call('ZREM', KEYS[2], ARGV[4])
local second = ARGV[1] ~= '' and ARGV[1] or string.format('%d', math.floor(tonumber(expires) - tonumber(ARGV[6])))
if tonumber(ARGV[3]) < 0 then
  redis.call('HINCRBY', KEYS[1], redis.call('TIME')[1] .. 't', -tonumber(ARGV[3]))
  redis.call('EXPIRE', KEYS[1], tonumber(ARGV[5]))
  return
end
for kind, amount in pairs({r = ARGV[2], t = ARGV[3]}) do
  if tonumber(amount) ~= 0 and redis.call('HEXISTS', KEYS[1], second .. kind) == 1 then
    redis.call('HINCRBY', KEYS[1], second .. kind, -tonumber(amount))
  end
end
