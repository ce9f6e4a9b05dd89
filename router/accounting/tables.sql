CREATE TABLE IF NOT EXISTS spent (
  account TEXT, period TEXT, engine_us INTEGER, money_u INTEGER, PRIMARY KEY (account, period)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held (
  account TEXT, id TEXT, day TEXT, month TEXT, engine_us INTEGER, money_u INTEGER, ends REAL,
  PRIMARY KEY (account, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settled (id TEXT PRIMARY KEY, at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (
  day TEXT, key TEXT, team TEXT, tier TEXT, requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER,
  output_tokens INTEGER, engine_us INTEGER, money_u INTEGER, highest_engine_us INTEGER, highest_money_u INTEGER,
  PRIMARY KEY (day, key, team, tier)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_copy (
  account TEXT, period TEXT, ledger TEXT, engine_us INTEGER, money_u INTEGER, PRIMARY KEY (account, period)) WITHOUT ROWID;
