package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// databases opens stores in databases, as the flags say.
type databases struct {
	passwordFile, identity string
	server                 spiffe.ID
}

func (d *databases) define(fs *flag.FlagSet) {
	fs.StringVar(&d.passwordFile, "store-password-file", "",
		"`file` with the password for -store, which is read at each new connection")
	fs.StringVar(&d.identity, "store-identity", "", "`directory` with svid.pem, svid-key.pem and bundle.pem, as svid "+
		"watch writes them, for TLS to the database: the certificate of the CA, and what verifies that of the server")
	fs.TextVar(&d.server, "store-server", spiffe.ID{},
		"`SPIFFE ID` of the database server (default: its certificate has the host name in -store)")
}

const (
	table   = "svidkit_ca"
	timeout = 10 * time.Second // of connecting, and of each statement
)

func schema(dialect string) func() (string, error) {
	var o sqlstore.Options
	o.Dialect, o.Table = dialect, table
	return func() (string, error) { return sqlstore.Schema(o) }
}

// password returns the contents of -store-password-file.
func (d *databases) password() (string, error) {
	if d.passwordFile == "" {
		return "", nil
	}
	f, err := private.OpenFile(d.passwordFile, os.O_RDONLY, private.Options{Keys: true})
	if err != nil {
		return "", fmt.Errorf("-store-password-file: %w", err)
	}
	defer f.Close()
	text, err := files.ReadAll(f, d.passwordFile, 4<<10)
	return strings.TrimRight(string(text), "\r\n"), err
}

// connection is how the flags have a driver connect.
type connection struct {
	source *filesource.Source // nil for none
	client func(host string) *tls.Config
}

// connect returns how to connect, and refuses what would send the keys of the CA over a network in the clear.
func (d *databases) connect(ctx context.Context, at *url.URL, hosts []string, log *slog.Logger) (*connection, error) {
	for name := range at.Query() {
		if lower := strings.ToLower(name); strings.HasPrefix(lower, "ssl") || strings.HasPrefix(lower, "tls") ||
			strings.HasSuffix(lower, "plaintext") {
			return nil, fmt.Errorf("the parameter %.64q is not for this program: TLS is as -store-identity says", name)
		}
	}
	if d.identity == "" {
		for _, host := range hosts {
			ip := net.ParseIP(host)
			if !strings.HasPrefix(host, "/") && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
				return nil, fmt.Errorf("%s is another machine, so name a directory in -store-identity, for TLS", host)
			}
		}
		if !d.server.IsZero() {
			return nil, errors.New("-store-server is for TLS, so name a directory in -store-identity")
		}
		return &connection{client: func(string) *tls.Config { return nil }}, nil
	}
	bundle := filepath.Join(d.identity, "bundle.pem")
	source, err := filesource.Start(ctx, filesource.Config{CertFile: filepath.Join(d.identity, "svid.pem"),
		KeyFile: filepath.Join(d.identity, "svid-key.pem"), Bundles: []filesource.BundleFile{{Path: bundle}},
		Logger: log})
	if err != nil {
		return nil, fmt.Errorf("-store-identity: %w", err)
	}
	c := spiffetls.Config{Self: source, MinVersion: tls.VersionTLS12, Logger: log}
	if d.server.IsZero() {
		c.WebRoots = func() (*x509.CertPool, error) {
			text, err := os.ReadFile(bundle)
			roots := x509.NewCertPool()
			if err == nil && !roots.AppendCertsFromPEM(text) {
				err = fmt.Errorf("%s has no certificates", bundle)
			}
			return roots, err
		}
	} else {
		c.Peers, c.Allow = source, spiffe.AllowIDs(d.server)
	}
	endpoint, err := spiffetls.New(c)
	var config *tls.Config
	if err == nil {
		config, err = endpoint.ClientConfig()
	}
	if err != nil {
		return nil, errors.Join(err, source.Close())
	}
	return &connection{source, func(host string) *tls.Config {
		own := config.Clone()
		own.ServerName = host
		return own
	}}, nil
}

// open returns a store over db, and what closes it.
func (c *connection) open(db *sql.DB, o sqlstore.Options) (ca.Store, func(), error) {
	// The store has one short statement at a time, and Watch another one.
	db.SetMaxOpenConns(3)
	db.SetConnMaxIdleTime(time.Minute)
	db.SetConnMaxLifetime(5 * time.Minute) // so that a server that was replaced is left
	o.Table = table
	closes := func() {
		_ = db.Close() // nothing waits to be written
		if c.source != nil {
			_ = c.source.Close()
		}
	}
	store, err := sqlstore.New(db, o)
	if err != nil {
		closes()
		return nil, nil, err
	}
	return store, closes, nil
}

// postgres opens a store in PostgreSQL. The driver also reads the variables and the password file of libpq.
func (d *databases) postgres(ctx context.Context, at *url.URL, record string, log *slog.Logger) (ca.Store,
	func(), error) {
	plain := *at
	query := plain.Query()
	query.Set("sslmode", "disable") // or the driver falls back to that
	plain.RawQuery = query.Encode()
	config, err := pgx.ParseConfig(plain.String())
	if err != nil {
		return nil, nil, err
	}
	hosts := []string{config.Host}
	for _, f := range config.Fallbacks {
		hosts = append(hosts, f.Host)
	}
	c, err := d.connect(ctx, at, hosts, log)
	if err != nil {
		return nil, nil, err
	}
	set := func(host string, to **tls.Config) {
		if !strings.HasPrefix(host, "/") {
			*to = c.client(host)
		}
	}
	set(config.Host, &config.TLSConfig)
	for _, f := range config.Fallbacks {
		set(f.Host, &f.TLSConfig)
	}
	// A call tries all servers in its time.
	config.ConnectTimeout = cmp.Or(config.ConnectTimeout, timeout/time.Duration(len(hosts)))
	if !query.Has("default_query_exec_mode") {
		config.DefaultQueryExecMode = pgx.QueryExecModeExec // PgBouncer may be between
	}
	prepare := func(_ context.Context, config *pgx.ConnConfig) error {
		password, err := d.password()
		config.Password = cmp.Or(password, config.Password)
		return err
	}
	listen := func(ctx context.Context, changed func()) error {
		own := config.Copy()
		if err := prepare(ctx, own); err != nil {
			return err
		}
		conn, err := pgx.ConnectConfig(ctx, own)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		_, err = conn.Exec(ctx, "LISTEN "+table)
		for err == nil {
			changed()
			_, err = conn.WaitForNotification(ctx)
		}
		return err
	}
	return c.open(stdlib.OpenDB(*config, stdlib.OptionBeforeConnect(prepare)),
		sqlstore.Options{Dialect: "postgres", Name: record, Listen: listen, Logger: log})
}

// mysql opens a store in MySQL or MariaDB.
func (d *databases) mysql(ctx context.Context, at *url.URL, record string, log *slog.Logger) (ca.Store,
	func(), error) {
	query := at.Query()
	network, address, host := "tcp", net.JoinHostPort(at.Hostname(), cmp.Or(at.Port(), "3306")), at.Hostname()
	if socket := query.Get("socket"); socket != "" {
		network, address, host = "unix", socket, socket
		query.Del("socket")
	}
	config, err := mysql.ParseDSN(fmt.Sprintf("%s@%s(%s)%s?%s", at.User.Username(), network, address,
		cmp.Or(at.Path, "/"), query.Encode()))
	if err != nil {
		return nil, nil, err
	}
	c, err := d.connect(ctx, at, []string{host}, log)
	if err != nil {
		return nil, nil, err
	}
	if network == "tcp" {
		config.TLS = c.client(host)
	}
	config.Logger = &mysql.NopLogger{} // what it says is in the errors
	config.Timeout, config.ReadTimeout = cmp.Or(config.Timeout, timeout), cmp.Or(config.ReadTimeout, timeout)
	config.WriteTimeout = cmp.Or(config.WriteTimeout, timeout)
	err = config.Apply(mysql.BeforeConnect(func(_ context.Context, config *mysql.Config) (err error) {
		config.Passwd, err = d.password()
		return err
	}))
	connector, bad := mysql.NewConnector(config)
	if err = cmp.Or(err, bad); err != nil {
		return nil, nil, err
	}
	return c.open(sql.OpenDB(connector), sqlstore.Options{Dialect: "mysql", Name: record, Logger: log})
}
