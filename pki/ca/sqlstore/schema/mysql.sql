-- The table of the CA. Run this as an administrator of the database.
CREATE TABLE IF NOT EXISTS {table} (
    name varchar(300) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY,
    version varchar(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    data longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE=InnoDB;

-- The role of the CA reads and replaces rows; it cannot delete them, or change the table.
CREATE ROLE IF NOT EXISTS {role};
GRANT SELECT, INSERT, UPDATE ON {table} TO {role};

-- Then, with the user of the CA: GRANT {role} TO 'user'@'host';
-- and in MariaDB: SET DEFAULT ROLE {role} FOR 'user'@'host';
-- or in MySQL: SET DEFAULT ROLE {role} TO 'user'@'host';
