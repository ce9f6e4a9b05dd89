-- KEYS: the ends of an account's reservations. ARGV: lease, ids.
local time = redis.call('TIME')
local ends = tonumber(time[1]) + tonumber(time[2]) / 1e6 + tonumber(ARGV[1])
for n = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[n]) end
