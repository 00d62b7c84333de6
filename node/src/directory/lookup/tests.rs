//! Which homes a question goes to, and what is made of their answers.

use larder_protocol::peer::RowSpan;
use larder_protocol::table::Epoch;

use super::super::tests::{SPACE, chunk, holder, table, table_of_one_home};
use super::*;

const NOW: Millis = Millis(1_000);

fn view(table: Arc<Table>) -> View {
    View { table, own: NodeNumber(1), ..View::default() }
}

fn span(from: u32, to: u32, node: u16) -> RowSpan {
    RowSpan { from, to, holder: holder(node) }
}

/// Asks the one home for eight chunks and takes these spans as its answer.
fn answered(view: &View, cache: &mut Cache, epoch: Epoch, spans: Vec<RowSpan>) -> Vec<Vec<u16>> {
    let chunks: Vec<_> = (0..8).map(chunk).collect();
    let mut lookup = Lookup::new(&SPACE, &chunks, view, cache, NOW);
    for ask in lookup.take_asks() {
        lookup.fill(&ask.positions, &Rows { epoch, spans: spans.clone() }, view, Some(cache), NOW);
    }
    let nodes = |holders: Holders| holders.iter().map(|holder| holder.node.0).collect();
    lookup.finish(view, NOW).into_iter().map(nodes).collect()
}

#[test]
fn each_home_gets_one_message_with_its_chunks_alone() {
    let view = view(table(1, &[(1, 1), (2, 2), (3, 3)].into()));
    let chunks: Vec<_> = (0..200).map(chunk).collect();
    let mut lookup = Lookup::new(&SPACE, &chunks, &view, &Cache::default(), NOW);
    let asks = lookup.take_asks();
    assert_eq!(asks.len(), 3);
    for ask in &asks {
        assert!(ask.find.rows.iter().all(|row| view.table.home(row.run.partition()) == Some(ask.home)));
    }
    let mut positions: Vec<u32> = asks.into_iter().flat_map(|ask| ask.positions).collect();
    positions.sort_unstable();
    assert_eq!(positions, (0..200).collect::<Vec<_>>());
    assert!(lookup.take_asks().is_empty());
}

#[test]
fn this_node_and_strangers_are_no_answer() {
    let view = view(table_of_one_home(1, &[(1, 1), (2, 2)]));
    let spans = vec![span(0, 4, 1), span(1, 3, 2), span(2, 8, 9)];
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans);
    assert_eq!(found[..4], [vec![], vec![2], vec![2], vec![]]);
}

#[test]
fn spans_that_make_no_sense_are_passed_over() {
    let view = view(table_of_one_home(1, &[(1, 1), (2, 2)]));
    let spans = vec![span(5, 3, 2), span(0, 4_000_000_000, 2), span(7, 8, 2), span(7, 8, 2)];
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 1]);
}

#[test]
fn those_who_are_suspect_or_silent_are_asked_only_where_nobody_else_has_it() {
    let mut members = Table::clone(&table_of_one_home(1, &[(1, 1), (2, 2), (3, 3), (4, 4)]));
    members.members[1].state = MemberState::Suspect;
    let mut view = view(Arc::new(members));
    view.is_silent(NodeNumber(3), NOW);
    let spans = vec![span(0, 3, 2), span(1, 3, 3), span(2, 3, 4)];
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans.clone());
    assert_eq!(found[..3], [vec![2], vec![2, 3], vec![4]]);
    view.answers(NodeNumber(3));
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans);
    assert_eq!(found[..3], [vec![2], vec![3], vec![3, 4]]);
}

#[test]
fn a_silent_home_is_not_asked_until_a_moment_has_passed() {
    let mut view = view(table(1, &[(1, 1), (2, 2)].into()));
    view.is_silent(NodeNumber(2), NOW);
    let chunks: Vec<_> = (0..200).map(chunk).collect();
    let homes = |now| {
        let asks = Lookup::new(&SPACE, &chunks, &view, &Cache::default(), now).take_asks();
        asks.into_iter().map(|ask| ask.home.0).collect::<Vec<_>>()
    };
    assert_eq!(homes(NOW), [1]);
    assert_eq!(homes(NOW + SILENT_MS), [1, 2]);
}

#[test]
fn an_answer_is_kept_and_that_nobody_has_it_only_from_a_home_of_the_same_table() {
    let view = view(table_of_one_home(1, &[(1, 1), (2, 2)]));
    let mut cache = Cache::default();
    let later = Epoch { term: 1, number: 2 };
    answered(&view, &mut cache, later, vec![span(0, 3, 2)]);
    let chunks: Vec<_> = (0..8).map(chunk).collect();
    let mut lookup = Lookup::new(&SPACE, &chunks, &view, &cache, NOW);
    assert_eq!(lookup.cached(), 3);
    assert_eq!(lookup.take_asks()[0].positions, [3, 4, 5, 6, 7]);
    answered(&view, &mut cache, view.table.epoch, Vec::new());
    assert_eq!(Lookup::new(&SPACE, &chunks, &view, &cache, NOW).cached(), 8);
}
