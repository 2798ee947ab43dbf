-- Makes the engine stop, wait, fail or end at a point, for tests: by triggers that are dropped again.

-- name: install
-- What the triggers do; their hits are counted by a sequence, which a rollback does not turn back.
CREATE SEQUENCE {schema}.failpoint_hits;
CREATE FUNCTION {schema}.failpoint() RETURNS trigger
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF nextval('{schema}.failpoint_hits') > TG_ARGV[1]::bigint THEN
        RETURN NULL;
    END IF;
    CASE TG_ARGV[0]
        WHEN 'stop' THEN PERFORM pg_advisory_xact_lock_shared({schema}.lock_key('failpoint'));
        WHEN 'delay' THEN PERFORM pg_sleep(TG_ARGV[2]::double precision);
        WHEN 'fail' THEN RAISE EXCEPTION 'failpoint' USING ERRCODE = TG_ARGV[3];
        WHEN 'kill' THEN PERFORM pg_terminate_backend(pg_backend_pid());
    END CASE;
    RETURN NULL;
END
$body$;

-- name: arm
-- Puts a point in its place.
CREATE TRIGGER failpoint {moment} ON {schema}.{table}
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.failpoint({deed}, {times}, {seconds}, {sqlstate});

-- name: drop
-- Takes away whatever is armed.
DROP FUNCTION IF EXISTS {schema}.failpoint() CASCADE;
DROP SEQUENCE IF EXISTS {schema}.failpoint_hits;

-- name: close_gate
-- Lets whoever comes to a point that stops wait for this session.
SELECT pg_advisory_lock({schema}.lock_key('failpoint'))

-- name: open_gate
-- Lets them go on.
SELECT pg_advisory_unlock({schema}.lock_key('failpoint'))

-- name: stopped
-- The processes that wait at a point for this session.
SELECT l.pid FROM pg_catalog.pg_locks l
WHERE l.locktype = 'advisory' AND NOT l.granted
  AND pg_catalog.pg_backend_pid() = ANY (pg_catalog.pg_blocking_pids(l.pid))
