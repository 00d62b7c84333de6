//! The rendering of a view on a terminal.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::view::{Numbers, View};
use crate::output;

/// The column by which nodes are sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// Name
    #[default]
    Name,
    /// Token hit rate, highest first
    Hit,
    /// Requests a second, most first
    Requests,
    /// Bytes leased to engines a second, most first
    Out,
    /// Bytes of memory in use, most first
    Memory,
    /// Evictions a second, most first
    Evictions,
}

/// The order of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SortOrder {
    pub(crate) sort: Sort,
    pub(crate) reversed: bool,
}

/// The visible part of a view, and its order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) order: SortOrder,
    /// Nodes above the first that is shown.
    first_node: usize,
    /// Columns between the node's name and the first that is shown.
    first_column: usize,
}

impl Look {
    /// The first nodes and columns, in this order.
    pub(crate) fn by(sort: Sort, reversed: bool) -> Self {
        Self { order: SortOrder { sort, reversed }, ..Self::default() }
    }

    /// Scrolls by this number of nodes, down or up.
    pub(crate) fn scroll(&mut self, rows: isize, nodes: usize) {
        self.first_node = self.first_node.saturating_add_signed(rows).min(nodes.saturating_sub(1));
    }

    /// Scrolls by this number of columns, right or left.
    pub(crate) fn pan(&mut self, columns: isize) {
        self.first_column = self.first_column.saturating_add_signed(columns).min(COLUMNS - 2);
    }
}

impl SortOrder {
    /// The next column to sort by.
    pub(crate) fn next(self) -> Self {
        let all = Sort::value_variants();
        let at = all.iter().position(|&sort| sort == self.sort).unwrap_or(0);
        Self { sort: all[(at + 1) % all.len()], ..self }
    }
}

/// The view as text, within the given columns and rows. No line is longer, so nothing wraps. The sum of all nodes is always
/// shown.
pub(crate) fn render(view: &View, look: Look, columns: usize, rows: usize) -> String {
    let Look { order, first_node, first_column } = look;
    let mut nodes: Vec<_> = view.nodes.iter().collect();
    nodes.sort_by(|a, b| {
        compare(order.sort, a.numbers.as_ref(), b.numbers.as_ref()).then(a.name.cmp(&b.name))
    });
    if order.reversed {
        nodes.reverse();
    }
    let room = rows.saturating_sub(FIXED_ROWS).max(1);
    let mut lines: Vec<[String; COLUMNS]> = vec![HEADINGS.map(str::to_owned)];
    // At the end of the list, the rows stay full.
    let first_node = first_node.min(nodes.len().saturating_sub(room));
    for node in nodes.iter().skip(first_node).take(room) {
        lines.push(cells(&node.name, &node.state, node.numbers.as_ref()));
    }
    if nodes.len() > 1 {
        lines.push(cells("all together", "", Some(&view.total)));
    }
    let trouble = view.trouble.as_ref().map(|trouble| format!("older figures: {trouble}"));
    let mut text = vec![trouble.unwrap_or_else(|| headline(view, order))];
    let (table, last_column) = aligned(&lines, first_column, columns);
    text.extend(table);
    if nodes.len() > room {
        let last = first_node + room;
        text.push(format!("nodes {} to {last} of {}", first_node + 1, output::count(nodes.len() as u64)));
    }
    let shown = format!("columns {} to {last_column} of {}", first_column + 1, COLUMNS - 1);
    let shown = if last_column - first_column < COLUMNS - 1 { shown } else { String::new() };
    text.push(format!("q quit  s sort  r reverse  arrows scroll  {shown}"));
    let cut = |line: String| line.chars().take(columns).collect::<String>().trim_end().to_owned();
    text.into_iter().map(cut).collect::<Vec<_>>().join("\n")
}

fn headline(view: &View, order: SortOrder) -> String {
    let alive = view.nodes.iter().filter(|node| node.state == "alive").count();
    let nodes = output::counted(view.nodes.len(), "node");
    let direction = if order.reversed { ", reversed" } else { "" };
    let sort = order.sort.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    format!("larder: {nodes}, {alive} alive, over {:.1} s, by {sort}{direction}", view.seconds)
}

fn cells(name: &str, state: &str, numbers: Option<&Numbers>) -> [String; COLUMNS] {
    let Some(n) = numbers else {
        let mut cells = [const { String::new() }; COLUMNS];
        (cells[0], cells[1]) = (name.to_owned(), state.to_owned());
        return cells;
    };
    let memory = format!("{} of {}", output::bytes(n.host_bytes), output::bytes(n.arena_bytes));
    [
        name.to_owned(),
        state.to_owned(),
        n.hit_rate.map_or_else(unknown, output::percent),
        per_second(n.requests_per_second),
        gigabytes(n.in_bytes_per_second),
        gigabytes(n.out_bytes_per_second),
        gigabytes(n.peer_in_bytes_per_second),
        gigabytes(n.peer_out_bytes_per_second),
        memory,
        output::count(n.host_chunks),
        n.disk_chunks.map_or_else(unknown, output::count),
        gigabytes(n.disk_chunks.and(n.disk_in_bytes_per_second)),
        gigabytes(n.disk_chunks.and(n.disk_out_bytes_per_second)),
        gigabytes(n.object_in_bytes_per_second),
        gigabytes(n.object_out_bytes_per_second),
        per_second(n.evictions_per_second),
        n.sessions.to_string(),
        n.leases.to_string(),
    ]
}

/// Aligns columns: names to the left, numbers to the right. The names stay; of the other columns, those from `first` on that fit
/// into `most` characters stay. Also returns the number of the last one.
fn aligned(lines: &[[String; COLUMNS]], first: usize, most: usize) -> (Vec<String>, usize) {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let cell = |(column, cell): (usize, &String)| match column {
        0 | 1 => format!("{cell:<width$}", width = widths[column]),
        _ => format!("{cell:>width$}", width = widths[column]),
    };
    let mut used = widths[0];
    let mut end = first + 1;
    while end < COLUMNS && (end == first + 1 || used + 2 + widths[end] <= most) {
        used += 2 + widths[end];
        end += 1;
    }
    let is_shown = |&(column, _): &(usize, &String)| column == 0 || (first + 1..end).contains(&column);
    let line = |line: &[String; COLUMNS]| {
        line.iter().enumerate().filter(is_shown).map(cell).collect::<Vec<_>>().join("  ")
    };
    (lines.iter().map(line).collect(), end - 1)
}

fn compare(sort: Sort, a: Option<&Numbers>, b: Option<&Numbers>) -> Ordering {
    let key = |numbers: Option<&Numbers>| {
        let numbers = numbers?;
        match sort {
            Sort::Name => None,
            Sort::Hit => numbers.hit_rate,
            Sort::Requests => numbers.requests_per_second,
            Sort::Out => numbers.out_bytes_per_second,
            Sort::Memory => Some(numbers.host_bytes as f64),
            Sort::Evictions => numbers.evictions_per_second,
        }
    };
    let most_first = |value: Option<f64>| value.unwrap_or(f64::NEG_INFINITY);
    most_first(key(b)).total_cmp(&most_first(key(a)))
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(unknown, |rate| output::count(rate.round() as u64))
}

fn gigabytes(rate: Option<f64>) -> String {
    rate.map_or_else(unknown, |rate| format!("{:.2}", rate / 1e9))
}

fn unknown() -> String {
    "-".to_owned()
}

const COLUMNS: usize = 18;

const HEADINGS: [&str; COLUMNS] = [
    "node",
    "state",
    "hit rate",
    "requests/s",
    "in GB/s",
    "out",
    "from peers",
    "to peers",
    "memory",
    "chunks",
    "on disk",
    "written GB/s",
    "read",
    "to objects",
    "from objects",
    "evicted/s",
    "sessions",
    "leases",
];

/// Headline, headings, sum, how many more there are, keys.
const FIXED_ROWS: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::NodeView;

    fn node(name: &str, hit_rate: f64) -> NodeView {
        let numbers = Numbers {
            hit_rate: Some(hit_rate),
            requests_per_second: Some(1234.4),
            out_bytes_per_second: Some(2.5e9),
            host_chunks: 3_000,
            host_bytes: 1 << 30,
            arena_bytes: 4 << 30,
            ..Numbers::default()
        };
        NodeView { name: name.into(), state: "alive".into(), numbers: Some(numbers) }
    }

    fn view() -> View {
        let silent = NodeView { name: "c".into(), state: "silent".into(), numbers: None };
        View { seconds: 1.0, nodes: vec![node("b", 0.25), silent, node("a", 0.5)], ..View::default() }
    }

    fn order(text: &str) -> Vec<char> {
        let names =
            text.lines().skip(2).filter_map(|line| line.split("  ").next()).filter(|name| name.len() == 1);
        names.filter_map(|name| name.chars().next()).collect()
    }

    #[test]
    fn the_last_figures_stay_while_nobody_answers() {
        let silent = View { trouble: Some("the coordinator does not answer".into()), ..view() };
        let text = render(&silent, Look::default(), 220, 50);
        assert!(text.starts_with("older figures: the coordinator does not answer\nnode"), "{text}");
        assert_eq!(order(&text), ['a', 'b', 'c']);
    }

    #[test]
    fn every_node_has_a_line_and_what_is_not_known_a_dash() {
        let text = render(&view(), Look::default(), 220, 50);
        let expected = "\
larder: 3 nodes, 2 alive, over 1.0 s, by name
node          state   hit rate  requests/s  in GB/s   out  from peers  to peers              memory  chunks  on disk  written GB/s  read  to objects  from objects  evicted/s  sessions  leases
a             alive     50.0 %       1,234        -  2.50           -         -  1.0 GiB of 4.0 GiB   3,000        -             -     -           -             -          -         0       0
b             alive     25.0 %       1,234        -  2.50           -         -  1.0 GiB of 4.0 GiB   3,000        -             -     -           -             -          -         0       0
c             silent
all together                 -           -        -     -           -         -          0 B of 0 B       0        -             -     -           -             -          -         0       0
q quit  s sort  r reverse  arrows scroll";
        assert_eq!(text, expected);
    }

    #[test]
    fn nodes_are_sorted_as_asked_and_the_silent_ones_come_last() {
        let with = |sort, reversed| order(&render(&view(), Look::by(sort, reversed), 200, 50));
        assert_eq!(with(Sort::Name, false), ['a', 'b', 'c']);
        assert_eq!(with(Sort::Name, true), ['c', 'b', 'a']);
        let mut unequal = view();
        unequal.nodes[0].numbers.as_mut().unwrap().hit_rate = Some(0.9);
        let text = render(&unequal, Look::by(Sort::Hit, false), 200, 50);
        assert_eq!(order(&text), ['b', 'a', 'c']);
    }

    #[test]
    fn a_small_terminal_shows_what_fits_and_says_what_does_not() {
        let text = render(&view(), Look::default(), 70, 7);
        assert!(text.lines().all(|line| line.chars().count() <= 70), "{text}");
        assert!(text.lines().count() <= 7 && text.contains("nodes 1 to 2 of 3"), "{text}");
        assert!(text.contains("columns 1 to 6 of 17"), "{text}");
    }

    #[test]
    fn scrolling_shows_every_node_and_every_column_and_stops_at_the_ends() {
        let mut look = Look::default();
        look.scroll(100, 3);
        let text = render(&view(), look, 220, 7);
        assert_eq!(order(&text), ['b', 'c'], "{text}");
        assert!(text.contains("nodes 2 to 3 of 3") && text.contains("all together"), "{text}");
        look.scroll(-100, 3);
        assert_eq!(order(&render(&view(), look, 220, 7)), ['a', 'b']);
        let mut seen = String::new();
        for _ in 0..2 * COLUMNS {
            let text = render(&view(), look, 80, 20);
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
            seen += text.lines().nth(1).unwrap();
            look.pan(1);
        }
        for heading in HEADINGS {
            assert!(seen.contains(heading), "{heading} is never shown");
        }
        let text = render(&view(), look, 80, 20);
        assert!(
            text.lines().nth(1).unwrap().ends_with("leases") && text.contains("columns 17 to 17 of 17"),
            "{text}"
        );
    }

    #[test]
    fn the_sort_key_goes_through_all_columns_and_comes_back() {
        let mut order = SortOrder::default();
        for _ in Sort::value_variants() {
            order = order.next();
        }
        assert_eq!(order, SortOrder::default());
    }
}
