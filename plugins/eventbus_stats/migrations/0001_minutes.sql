-- Statistics: one row for each minute and queue in which something happened.

-- Written by every worker about every five seconds, and removed when it is old enough. The bucket arrays end with the
-- last bucket that is not zero; their bounds are those of eventbus_stats.histogram and are not changed.
CREATE TABLE {schema}.stats_minutes (
    minute timestamptz NOT NULL,
    queue text NOT NULL,
    published bigint NOT NULL DEFAULT 0,
    handled bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    retried bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    discarded bigint NOT NULL DEFAULT 0,
    deferred bigint NOT NULL DEFAULT 0,
    released bigint NOT NULL DEFAULT 0,
    lost_leases bigint NOT NULL DEFAULT 0,
    seconds_sum double precision NOT NULL DEFAULT 0,
    seconds_max double precision NOT NULL DEFAULT 0,
    waited_sum double precision NOT NULL DEFAULT 0,
    waited_max double precision NOT NULL DEFAULT 0,
    seconds_buckets bigint[] NOT NULL DEFAULT '{}',
    waited_buckets bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (minute, queue)
) WITH (  -- rows are updated within their minute only, so what is dead does not grow with the table
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- Two arrays of counters added element by element; the longer one decides the length.
CREATE FUNCTION {schema}.stats_sum(p_one bigint[], p_other bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp AS $body$
    SELECT coalesce(array_agg(coalesce(b.one, 0) + coalesce(b.other, 0) ORDER BY b.n), '{}')
    FROM unnest(p_one, p_other) WITH ORDINALITY AS b (one, other, n)
$body$;

-- Adds what one worker has counted to the minute that is now, by the server's clock. p_rows: an array of objects, at
-- most one for each queue; what is missing in an object counts as 0.
--
-- The rows are locked in the order of their keys, so that workers that write at the same time wait for each other and
-- never deadlock. A crash of the server may lose the last calls.
CREATE FUNCTION {schema}.stats_add(p_rows jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO {schema}.stats_minutes AS m (
        minute, queue, published, handled, failed, retried, dead, duplicates, discarded, deferred, released,
        lost_leases, seconds_sum, seconds_max, waited_sum, waited_max, seconds_buckets, waited_buckets)
    SELECT date_trunc('minute', statement_timestamp(), 'UTC'), r.queue, coalesce(r.published, 0),
        coalesce(r.handled, 0), coalesce(r.failed, 0), coalesce(r.retried, 0), coalesce(r.dead, 0),
        coalesce(r.duplicates, 0), coalesce(r.discarded, 0), coalesce(r.deferred, 0), coalesce(r.released, 0),
        coalesce(r.lost_leases, 0), coalesce(r.seconds_sum, 0), coalesce(r.seconds_max, 0),
        coalesce(r.waited_sum, 0), coalesce(r.waited_max, 0), coalesce(r.seconds_buckets, '{}'),
        coalesce(r.waited_buckets, '{}')
    FROM jsonb_to_recordset(p_rows) AS r (
        queue text, published bigint, handled bigint, failed bigint, retried bigint, dead bigint, duplicates bigint,
        discarded bigint, deferred bigint, released bigint, lost_leases bigint, seconds_sum double precision,
        seconds_max double precision, waited_sum double precision, waited_max double precision,
        seconds_buckets bigint[], waited_buckets bigint[])
    ORDER BY r.queue
    ON CONFLICT (minute, queue) DO UPDATE SET
        published = m.published + excluded.published,
        handled = m.handled + excluded.handled,
        failed = m.failed + excluded.failed,
        retried = m.retried + excluded.retried,
        dead = m.dead + excluded.dead,
        duplicates = m.duplicates + excluded.duplicates,
        discarded = m.discarded + excluded.discarded,
        deferred = m.deferred + excluded.deferred,
        released = m.released + excluded.released,
        lost_leases = m.lost_leases + excluded.lost_leases,
        seconds_sum = m.seconds_sum + excluded.seconds_sum,
        seconds_max = greatest(m.seconds_max, excluded.seconds_max),
        waited_sum = m.waited_sum + excluded.waited_sum,
        waited_max = greatest(m.waited_max, excluded.waited_max),
        seconds_buckets = {schema}.stats_sum(m.seconds_buckets, excluded.seconds_buckets),
        waited_buckets = {schema}.stats_sum(m.waited_buckets, excluded.waited_buckets);
END
$body$;

-- Removes minutes that are older than p_retention seconds, at most p_limit rows. Returns how many.
CREATE FUNCTION {schema}.stats_purge(p_retention double precision, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_count integer;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM {schema}.stats_minutes m WHERE m.ctid = ANY (ARRAY(
        SELECT x.ctid FROM {schema}.stats_minutes x
        WHERE x.minute < statement_timestamp() - make_interval(secs => p_retention)
        ORDER BY x.minute LIMIT p_limit));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;
