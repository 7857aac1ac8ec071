"""A `Report` in the formats that its readers take: each module has one `render`, which decides nothing."""
