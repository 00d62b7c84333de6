//! Tests of lookups: which homes a question goes to, and how their answers are merged.

use larder_protocol::Chain;
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

/// Asks the only home for eight chunks, with these spans as its answer. Returns the nodes found for each chunk.
fn answered(view: &View, cache: &mut Cache, epoch: Epoch, spans: Vec<RowSpan>) -> Vec<Vec<u16>> {
    let chunks: Vec<_> = (0..8).map(chunk).collect();
    let mut lookup = Lookup::new(&SPACE, &chunks, view, cache, NOW);
    for ask in lookup.take_asks() {
        lookup.fill(&ask.positions, &Rows { epoch, spans: spans.clone() }, view, Some(cache), NOW);
    }
    let nodes = |holders: Holders| holders.iter().map(|holder| holder.node.0).collect();
    lookup.finish(view).into_iter().map(nodes).collect()
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
fn what_nodes_of_version_1_announce_in_their_shorter_runs_is_found() {
    let merged = table(1, &[(1, 1), (2, 2), (3, 3)].into());
    let hashes = (0..100).map(|number| ChunkHash([number; 32])).collect();
    let chunks: Vec<ChunkRef> = Chain::from_root(ChunkHash([255; 32]), hashes).chunks().collect();
    let row_before = |number: usize| {
        let anchor = &chunks[run_start_before(number as u32) as usize];
        RowKey::new(&SPACE, &ChunkRef { anchor: anchor.hash, ..chunks[number] })
    };
    let found = |table: &Arc<Table>| {
        let view = view(Arc::clone(table));
        let mut lookup = Lookup::new(&SPACE, &chunks, &view, &Cache::default(), NOW);
        for HomeAsk { find: Find { epoch, rows }, positions, .. } in lookup.take_asks() {
            let is_there = |row: &RowKey| (0..chunks.len()).any(|number| row_before(number) == *row);
            let at = (0..).zip(&rows).filter(|(_, row)| is_there(row));
            let spans = at.map(|(at, _)| span(at, at + 1, 2)).collect();
            lookup.fill(&positions, &Rows { epoch, spans }, &view, None, NOW);
        }
        lookup.finish(&view).iter().filter(|holders| holders.len() == 1).count()
    };
    assert_eq!(found(&merged), 100);
    let mut fine = Table::clone(&merged);
    fine.homes[0] = NodeNumber(if fine.homes[1] == NodeNumber(2) { 3 } else { 2 });
    assert!(found(&Arc::new(fine)) < 50, "without such nodes nobody asks for their rows");
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
    view.silent.insert(NodeNumber(3));
    let spans = vec![span(0, 3, 2), span(1, 3, 3), span(2, 3, 4)];
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans.clone());
    assert_eq!(found[..3], [vec![2], vec![2, 3], vec![4]]);
    view.silent.clear();
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans);
    assert_eq!(found[..3], [vec![2], vec![3], vec![3, 4]]);
}

/// The homes that are asked for many chunks.
fn homes(view: &View, now: Millis) -> Vec<u16> {
    let chunks: Vec<_> = (0..200).map(chunk).collect();
    let asks = Lookup::new(&SPACE, &chunks, view, &Cache::default(), now).take_asks();
    asks.into_iter().map(|ask| ask.home.0).collect()
}

#[test]
fn a_home_that_was_late_once_is_asked_on_and_after_that_left_alone_for_a_moment_longer_each_time() {
    let mut view = view(table(1, &[(1, 1), (2, 2)].into()));
    let mut pauses = Vec::new();
    let mut now = NOW;
    for _ in 0..6 {
        view.is_late(NodeNumber(2), now);
        let late = now;
        while homes(&view, now) == [1] {
            now = now + 50;
        }
        pauses.push(now.since(late));
    }
    assert_eq!(pauses, [0, 100, 200, 400, 800, 1_000]);
    view.answers(NodeNumber(2));
    view.is_late(NodeNumber(2), now);
    assert_eq!(homes(&view, now), [1, 2], "what was before its answer counts no more");
}

#[test]
fn a_home_that_is_late_with_lookups_is_a_holder_like_any_other() {
    let mut view = view(table_of_one_home(1, &[(1, 1), (2, 2), (3, 3)]));
    (0..5).for_each(|_| view.is_late(NodeNumber(3), NOW));
    let spans = vec![span(0, 2, 2), span(1, 3, 3)];
    let found = answered(&view, &mut Cache::default(), view.table.epoch, spans);
    assert_eq!(found[..3], [vec![2], vec![2, 3], vec![3]]);
}

#[test]
fn a_silent_home_is_not_asked() {
    let mut view = view(table(1, &[(1, 1), (2, 2)].into()));
    view.silent.insert(NodeNumber(2));
    assert_eq!(homes(&view, NOW), [1]);
}

#[test]
fn a_home_that_names_everybody_for_everything_keeps_nobody_long() {
    let members: Vec<(u16, u64)> = (1..=100).map(|number| (number, 1)).collect();
    let view = view(table_of_one_home(1, &members));
    let chunks: Vec<_> = (0..MAX_FIND_ROWS as u64).map(chunk).collect();
    let mut lookup = Lookup::new(&SPACE, &chunks, &view, &Cache::default(), NOW);
    let asks = lookup.take_asks();
    let all = chunks.len() as u32;
    let spans: Vec<_> = (0..60_000).map(|number: u32| span(0, all, (number % 100) as u16)).collect();
    lookup.fill(&asks[0].positions, &Rows { epoch: view.table.epoch, spans }, &view, None, NOW);
    assert!(lookup.finish(&view).iter().all(|holders| holders.len() < MAX_FOUND_HOLDERS));
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
