-- The table of the CA. Run this as an administrator of the database.
CREATE TABLE IF NOT EXISTS {table} (
    name varchar(300) PRIMARY KEY,
    version varchar(128) NOT NULL,
    data text NOT NULL
);

-- Each change is told to the clients that LISTEN {role}.
CREATE OR REPLACE FUNCTION {table}_changed() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_notify(''{role}'', NEW.name); RETURN NULL; END';
CREATE OR REPLACE TRIGGER changed AFTER INSERT OR UPDATE ON {table}
    FOR EACH ROW EXECUTE FUNCTION {table}_changed();

-- The role of the CA reads and replaces rows; it cannot delete them, or change the table.
DO 'BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END';
DO 'BEGIN EXECUTE (SELECT format(''GRANT USAGE ON SCHEMA %s TO {role}'', relnamespace::regnamespace)
    FROM pg_class WHERE oid = ''{table}''::regclass); END';
REVOKE ALL ON {table} FROM PUBLIC, {role};
GRANT SELECT, INSERT, UPDATE ON {table} TO {role};

-- Then, with the user of the CA: GRANT {role} TO "user";
