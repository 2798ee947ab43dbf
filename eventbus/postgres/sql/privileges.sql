-- name: missing
-- Which of the given rights this role does not have; a right without a column is one on the whole table or sequence.
SELECT w.n
FROM unnest(%(objects)s::text[], %(rights)s::text[], %(columns)s::text[])
    WITH ORDINALITY AS w (object, privilege, col, n)
JOIN pg_catalog.pg_namespace s ON s.nspname = '{name}'
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = s.oid AND c.relname = w.object
WHERE NOT coalesce(CASE
    WHEN w.privilege = 'USAGE' THEN pg_catalog.has_schema_privilege(s.oid, 'USAGE')
    WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, w.privilege)
    WHEN w.col IS NULL THEN pg_catalog.has_table_privilege(c.oid, w.privilege)
    ELSE pg_catalog.has_column_privilege(c.oid, w.col, w.privilege) END, false)
ORDER BY w.n
