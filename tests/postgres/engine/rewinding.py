"""A bus that many tests use one after the other, each as if it were new: migrating takes longer than they do."""

from __future__ import annotations

from tests.postgres.engine.driver import Engine

REWIND = """
CREATE FUNCTION {bus}.rewind() RETURNS void LANGUAGE plpgsql SET session_replication_role = replica AS $body$
DECLARE
    v_name text;
    v_start bigint;
BEGIN
    FOR v_name IN SELECT relname FROM pg_class WHERE relnamespace = '{bus}'::regnamespace AND relkind = 'r' LOOP
        EXECUTE format('DELETE FROM {bus}.%I', v_name);
    END LOOP;
    FOR v_name, v_start IN SELECT sequencename, start_value FROM pg_sequences WHERE schemaname = '{name}' LOOP
        EXECUTE format('SELECT setval(%L, %s, false)', format('{bus}.%I', v_name), v_start);
    END LOOP;
END
$body$
"""
FINGERPRINT = """
SELECT md5(string_agg(thing, '' ORDER BY thing)) FROM (
    SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = '{bus}'::regnamespace
    UNION ALL SELECT relname || relkind::text FROM pg_class WHERE relnamespace = '{bus}'::regnamespace
    UNION ALL SELECT tgname || tgfoid::text || tgrelid::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE c.relnamespace = '{bus}'::regnamespace AND NOT t.tgisinternal
) things (thing)
"""


class Rewinding:
    """The bus, as it was when it had just been migrated."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._first_rows = {
            table: engine.rows(f"SELECT to_json(t)::text FROM {{bus}}.{table} t") for table in ("bus", "ticks")
        }
        engine.rows(REWIND.replace("{name}", engine.schema))
        self._fingerprint = engine.value(FINGERPRINT)

    def rewind(self) -> None:
        """Forget everything that happened; fails for a test that changed more than rows."""
        assert self.engine.value(FINGERPRINT) == self._fingerprint, "this test changes the schema: let it use own_bus"
        with self.engine.connection.transaction():
            self.engine.rows("SELECT {bus}.rewind()")
            for table, rows in self._first_rows.items():
                for (row,) in rows:
                    self.engine.rows(
                        f"INSERT INTO {{bus}}.{table} SELECT * FROM json_populate_record(NULL::{{bus}}.{table}, %s)",
                        row,
                    )
