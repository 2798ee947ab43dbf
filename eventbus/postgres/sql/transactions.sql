-- What surrounds a transactional handler, one round trip each. The values are numbers and uuids, filled in as text:
-- several statements at once cannot have parameters.

-- name: clean
-- Makes the session as good as new before a transaction. Nobody's search_path is in force after RESET ALL.
RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; %(session)s; CLOSE ALL; UNLISTEN *; DISCARD TEMP; DISCARD SEQUENCES;
SELECT {schema}.forget_session()

-- name: begin
-- Marks the transaction that has just begun. No query, so that the handler may still choose the isolation level.
SET LOCAL eventbus.delivery = '%(mark)s'; SET LOCAL idle_in_transaction_session_timeout = %(idle)s

-- name: complete
-- Undoes what would disturb the bookkeeping, then completes the deliveries. Nothing but COMMIT follows.
RESET SESSION AUTHORIZATION; RESET ROLE; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = %(patience)s;
SET LOCAL idle_in_transaction_session_timeout = %(patience)s;
SELECT {schema}.complete('%(mark)s'::pg_catalog.text, '{%(claims)s}'::pg_catalog.int8[],
    '{%(claim_tokens)s}'::pg_catalog.uuid[], '{%(seqs)s}'::pg_catalog.int8[], '{%(exceptions)s}'::pg_catalog.int8[],
    '{%(exception_tokens)s}'::pg_catalog.uuid[], %(queue)s, '{%(event_ids)s}'::pg_catalog.uuid[],
    '{%(replays)s}'::pg_catalog.int4[])
