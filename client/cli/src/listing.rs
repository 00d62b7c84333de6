//! A list with columns: a table on a terminal, plain lines in a pipe, or fields between tabs.

use std::io::{self, IsTerminal as _};

use clap::ValueEnum;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use rustix::termios::tcgetwinsize;
use serde::Serialize;

use crate::output;

/// The format of a printed result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The columns that fit 80 characters
    #[default]
    Table,
    /// Every column
    Wide,
    /// Every column as fields between tabs: numbers without units, times in seconds, rates as fractions
    Tsv,
    /// JSON
    Json,
}

/// The arguments that choose a format.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct FormatArgs {
    /// Output format: a table is plain if standard output is no terminal
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t, conflicts_with = "json")]
    output: Format,

    /// Print JSON, as `-o json` does
    #[arg(long)]
    json: bool,
}

impl FormatArgs {
    /// The chosen format.
    pub(crate) fn format(self) -> Format {
        if self.json { Format::Json } else { self.output }
    }

    /// Prints an answer in the chosen format: as JSON, or as the text for people and scripts.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn print(
        self,
        answer: &impl Serialize,
        text: impl FnOnce(Format) -> String,
    ) -> io::Result<()> {
        match self.format() {
            Format::Json => output::print_json(answer),
            format => output::print(&text(format)),
        }
    }
}

/// A list.
#[derive(Debug)]
pub(crate) struct Listing {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

/// One column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    is_wide: bool,
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    Unknown,
    Text(String),
    Count(u64),
    Bytes(u64),
    /// A part of a whole, from 0 to 1.
    Share(f64),
    Seconds(f64),
}

/// A column of every table.
pub(crate) const fn column(name: &'static str) -> Column {
    Column { name, is_wide: false }
}

/// A column of wide tables.
pub(crate) const fn wide(name: &'static str) -> Column {
    Column { name, is_wide: true }
}

impl Listing {
    /// A list without rows.
    pub(crate) fn new(columns: &[Column]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row. Cells that are missing at its end stay empty.
    pub(crate) fn add(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let mut row: Vec<Cell> = cells.into_iter().collect();
        row.resize(self.columns.len(), Cell::Unknown);
        self.rows.push(row);
    }

    /// Whether the list has no row.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The list as text, for this process's standard output.
    pub(crate) fn text(&self, format: Format) -> String {
        let width = tcgetwinsize(io::stdout()).map_or(0, |size| size.ws_col);
        // A unit test gets the same text with and without a terminal.
        let is_terminal = !cfg!(test) && io::stdout().is_terminal();
        let terminal = is_terminal.then_some(if width == 0 { USUAL_WIDTH } else { width });
        self.text_for(format, terminal)
    }

    /// The list as text, for a terminal of that many columns, or for a pipe.
    fn text_for(&self, format: Format, terminal: Option<u16>) -> String {
        if format == Format::Tsv {
            return self.tsv();
        }
        let is_shown = |column: &Column| format != Format::Table || !column.is_wide;
        let shown = |row: &[Cell]| -> Vec<String> {
            let cells = row.iter().zip(&self.columns).filter(|(_, column)| is_shown(column));
            cells.map(|(cell, _)| cell.for_people()).collect()
        };
        let mut table = Table::new();
        table.set_header(self.columns.iter().filter(|column| is_shown(column)).map(|column| column.name));
        self.rows.iter().for_each(|row| _ = table.add_row(shown(row)));
        let numbers = self.columns.iter().enumerate().filter(|(_, column)| is_shown(column));
        for (place, (column, _)) in numbers.enumerate() {
            let is_number = self.rows.iter().any(|row| row[column].is_number());
            if let (true, Some(column)) = (is_number, table.column_mut(place)) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let Some(width) = terminal else {
            table.load_style(presets::NOTHING);
            // The table begins each line with a space.
            let plain = |line: String| format!("{}\n", line.strip_prefix(' ').unwrap_or(&line).trim_end());
            return table.lines().map(plain).collect();
        };
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        format!("{table}\n")
    }

    fn tsv(&self) -> String {
        let line = |fields: Vec<String>| fields.join("\t") + "\n";
        let headings = line(self.columns.iter().map(|column| column.name.to_owned()).collect());
        self.rows
            .iter()
            .fold(headings, |text, row| text + &line(row.iter().map(Cell::for_programs).collect()))
    }
}

impl Cell {
    /// The cell of a value that may be unknown.
    pub(crate) fn of<T>(value: Option<T>, cell: impl FnOnce(T) -> Self) -> Self {
        value.map_or(Self::Unknown, cell)
    }

    fn is_number(&self) -> bool {
        !matches!(self, Self::Unknown | Self::Text(_))
    }

    fn for_people(&self) -> String {
        match self {
            Self::Unknown => String::new(),
            Self::Text(text) => text.clone(),
            Self::Count(number) => output::count(*number),
            Self::Bytes(bytes) => output::bytes(*bytes),
            Self::Share(share) => output::percent(*share),
            Self::Seconds(seconds) => output::duration(*seconds),
        }
    }

    fn for_programs(&self) -> String {
        match self {
            Self::Unknown => String::new(),
            Self::Text(text) => text.replace(['\t', '\n', '\r'], " "),
            Self::Count(number) | Self::Bytes(number) => number.to_string(),
            Self::Share(number) | Self::Seconds(number) => format!("{number:.4}"),
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// The width of a terminal that does not report its width.
const USUAL_WIDTH: u16 = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> Listing {
        let mut list = Listing::new(&[column("node"), column("chunks"), wide("used"), wide("hit rate")]);
        list.add(["a".into(), Cell::Count(1_234), Cell::Bytes(1 << 20), Cell::Share(0.25)]);
        list.add(["long\tname".into(), Cell::Count(5)]);
        list
    }

    #[test]
    fn a_pipe_gets_plain_lines_and_wide_ones_when_asked() {
        let plain = list().text_for(Format::Table, None);
        assert_eq!(plain.lines().map(|line| line.split_whitespace().count()).collect::<Vec<_>>(), [2, 2, 3]);
        assert!(plain.is_ascii() && plain.starts_with("node"), "{plain}");
        let wide = list().text_for(Format::Wide, None);
        assert!(wide.contains("1.0 MiB") && wide.contains("25.0 %"), "{wide}");
    }

    #[test]
    fn numbers_in_the_first_column_stand_under_each_other_in_a_pipe() {
        let mut list = Listing::new(&[column("ago"), column("node")]);
        [3.2, 12.0].into_iter().for_each(|ago| list.add([Cell::Seconds(ago), "a".into()]));
        list.add([Cell::Unknown, "b".into()]);
        let text = list.text_for(Format::Table, None);
        let places: Vec<_> = text.lines().map(|line| line.rfind(['e', 'a', 'b'])).collect();
        assert_eq!((text.lines().next(), &places[1..]), (Some("  ago  node"), &[Some(7); 3][..]), "{text}");
    }

    #[test]
    fn fields_between_tabs_are_numbers_without_units() {
        let text = list().text_for(Format::Tsv, Some(10));
        let expected = "node\tchunks\tused\thit rate\na\t1234\t1048576\t0.2500\nlong name\t5\t\t\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_terminal_gets_borders_and_no_line_longer_than_it() {
        let mut list = list();
        list.add([Cell::Text("word ".repeat(40)), Cell::Count(1)]);
        let text = list.text_for(Format::Table, Some(80));
        assert!(text.contains('│') && text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}
