-- Installing and upgrading the schema. Nothing here has parameters: the same text goes to a connection and into the
-- script for psql. Roles and databases may have settings of their own; none of them may decide what happens here.

-- name: begin
-- Starts the transaction of one step.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;

-- name: settings
-- Takes the role's own settings out of one step's transaction.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = on;

-- name: lock
-- Lets one process at a time migrate this schema; the others wait here.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('eventbus migrate {name}', 0))

-- name: create_schema
-- Makes the schema.
CREATE SCHEMA {schema};

-- name: create_table
-- Makes the table that records what was applied.
CREATE TABLE IF NOT EXISTS {schema}.migrations (
    name text PRIMARY KEY,
    digest text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

-- name: situation
-- Who we are, what is there already, and which rights we have on it.
SELECT current_user::text AS role,
       pg_catalog.current_database()::text AS database,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create_schema,
       n.oid IS NOT NULL AS schema_exists,
       coalesce(pg_catalog.pg_get_userbyid(n.nspowner)::text, '') AS owner,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false) AS may_use,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'CREATE'), false) AS may_create,
       c.oid IS NOT NULL AS installed,
       coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false) AS may_read
FROM (VALUES (1)) AS one (row)
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = '{name}'
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = 'migrations'

-- name: applied
-- The steps that were applied here, and the digests of their texts; null where none was recorded.
SELECT m.name, pg_catalog.jsonb_extract_path_text(pg_catalog.to_jsonb(m), 'digest') AS digest
FROM {schema}.migrations m ORDER BY m.name
