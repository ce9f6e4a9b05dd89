-- KEYS: as of budget_reserve.lua. ARGV: id, engine and money used, for how long the mark and the costs are kept.
if not redis.call('SET', KEYS[1], '', 'NX', 'EX', ARGV[4]) then return end
for n = 0, (#KEYS - 1) / 4 - 1 do
  redis.call('HDEL', KEYS[4 + 4 * n], ARGV[1])
  redis.call('ZREM', KEYS[5 + 4 * n], ARGV[1])
  for which = 0, 1 do
    local spent = KEYS[2 + 4 * n + which]
    redis.call('HINCRBY', spent, 'engine_us', ARGV[2])
    redis.call('HINCRBY', spent, 'money_u', ARGV[3])
    redis.call('EXPIRE', spent, ARGV[5])
  end
end
