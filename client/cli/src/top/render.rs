//! How a view looks on a terminal.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::view::{Numbers, View};
use crate::output;

/// By what nodes are sorted.
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

/// How nodes are ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) sort: Sort,
    pub(crate) reversed: bool,
}

impl Order {
    /// By the next of what nodes can be sorted by.
    pub(crate) fn next(self) -> Self {
        let all = Sort::value_variants();
        let at = all.iter().position(|&sort| sort == self.sort).unwrap_or(0);
        Self { sort: all[(at + 1) % all.len()], ..self }
    }
}

/// At most so many lines of at most so many characters; none is longer, so that nothing wraps.
pub(crate) fn render(view: &View, order: Order, columns: usize, rows: usize) -> String {
    let mut nodes: Vec<_> = view.nodes.iter().collect();
    nodes.sort_by(|a, b| {
        compare(order.sort, a.numbers.as_ref(), b.numbers.as_ref()).then(a.name.cmp(&b.name))
    });
    if order.reversed {
        nodes.reverse();
    }
    let room = rows.saturating_sub(FIXED_ROWS).max(1);
    let mut lines: Vec<[String; COLUMNS]> = vec![HEADINGS.map(str::to_owned)];
    for node in nodes.iter().take(room) {
        lines.push(cells(&node.name, &node.state, node.numbers.as_ref()));
    }
    if nodes.len() > 1 {
        lines.push(cells("all together", "", Some(&view.total)));
    }
    let mut text = vec![headline(view, order)];
    text.extend(aligned(&lines));
    if nodes.len() > room {
        text.push(format!("and {} more", output::counted(nodes.len() - room, "node")));
    }
    text.push("q quit   s sort by the next column   r reverse".to_owned());
    let cut = |line: String| line.chars().take(columns).collect::<String>().trim_end().to_owned();
    text.into_iter().map(cut).collect::<Vec<_>>().join("\n")
}

fn headline(view: &View, order: Order) -> String {
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
        n.hit_rate.map_or_else(unknown, |rate| format!("{:.1} %", 100.0 * rate)),
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

/// Columns under each other: names to the left, numbers to the right.
fn aligned(lines: &[[String; COLUMNS]]) -> Vec<String> {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let cell = |(column, cell): (usize, &String)| match column {
        0 | 1 => format!("{cell:<width$}", width = widths[column]),
        _ => format!("{cell:>width$}", width = widths[column]),
    };
    lines.iter().map(|line| line.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ")).collect()
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
    fn every_node_has_a_line_and_what_is_not_known_a_dash() {
        let text = render(&view(), Order::default(), 220, 50);
        let expected = "\
larder: 3 nodes, 2 alive, over 1.0 s, by name
node          state   hit rate  requests/s  in GB/s   out  from peers  to peers              memory  chunks  on disk  written GB/s  read  to objects  from objects  evicted/s  sessions  leases
a             alive     50.0 %       1,234        -  2.50           -         -  1.0 GiB of 4.0 GiB   3,000        -             -     -           -             -          -         0       0
b             alive     25.0 %       1,234        -  2.50           -         -  1.0 GiB of 4.0 GiB   3,000        -             -     -           -             -          -         0       0
c             silent
all together                 -           -        -     -           -         -          0 B of 0 B       0        -             -     -           -             -          -         0       0
q quit   s sort by the next column   r reverse";
        assert_eq!(text, expected);
    }

    #[test]
    fn nodes_are_sorted_as_asked_and_the_silent_ones_come_last() {
        let with = |sort, reversed| order(&render(&view(), Order { sort, reversed }, 200, 50));
        assert_eq!(with(Sort::Name, false), ['a', 'b', 'c']);
        assert_eq!(with(Sort::Name, true), ['c', 'b', 'a']);
        let mut unequal = view();
        unequal.nodes[0].numbers.as_mut().unwrap().hit_rate = Some(0.9);
        let text = render(&unequal, Order { sort: Sort::Hit, reversed: false }, 200, 50);
        assert_eq!(order(&text), ['b', 'a', 'c']);
    }

    #[test]
    fn a_small_terminal_shows_what_fits_and_says_what_does_not() {
        let text = render(&view(), Order::default(), 30, 7);
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert!(text.lines().count() <= 7 && text.contains("and 1 node more"), "{text}");
    }

    #[test]
    fn the_sort_key_goes_through_all_columns_and_comes_back() {
        let mut order = Order::default();
        for _ in Sort::value_variants() {
            order = order.next();
        }
        assert_eq!(order, Order::default());
    }
}
