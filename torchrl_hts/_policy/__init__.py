"""Running a policy so that what a row gets depends on that row alone. Knows no environments."""
