"""The report page: results files in, one self-contained HTML page out."""
