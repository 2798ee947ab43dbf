-- What eventbus doctor asks beyond what other commands show.

-- name: server
-- Whether this is a server to work with, and how many more connections it takes.
SELECT current_setting('server_version_num')::integer AS version, pg_is_in_recovery() AS standby,
       current_setting('default_transaction_read_only')::boolean AS read_only,
       current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
           AS most_connections,
       (SELECT count(*) FROM pg_stat_activity a WHERE a.backend_type = 'client backend')::integer AS connections

-- name: notify
-- Says something to whoever listens.
SELECT pg_notify('{name}.doctor', %s)

-- name: listen
-- Hears what notify says.
LISTEN "{name}.doctor"
