package sqlitestore

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/pressly/goose/v3"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate brings the tables up to date. SQLite has no lock for it that survives a
// commit, so where two processes meet one of them tries again and finds the work
// done: every migration may run twice.
func migrate(ctx context.Context, db *sql.DB) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	for try := 1; ; try++ {
		p, err := goose.NewProvider(goose.DialectSQLite3, db, files, goose.WithLogger(goose.NopLogger()))
		if err == nil {
			_, err = p.Up(ctx)
		}
		if err == nil {
			return nil
		}
		if try == 20 || ctx.Err() != nil {
			return fmt.Errorf("sqlitestore: migrate: %w", err)
		}
		t := time.NewTimer(time.Duration(try) * 5 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}
