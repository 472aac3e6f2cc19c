-- The table of the CA. The mode of the file decides who may read it.
CREATE TABLE IF NOT EXISTS {table} (
    name TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    data TEXT NOT NULL
);
