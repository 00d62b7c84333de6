//! Divided orders: together their pieces copy every byte of the order once, through a buffer of any size.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::order::RegionId;
use crate::testing::layouts;

/// Pages of `chunks` chunks, of which some stand one behind the other.
fn pages(layout: &PagedLayout, chunks: u64) -> Vec<PageCopy> {
    let per_chunk = layout.spec().pages_per_chunk;
    let of_chunk = |chunk: u64| {
        let offset = (chunk + chunk / 2) * layout.block_bytes();
        let block = RegionOffset { region: RegionId(7), offset };
        (0..per_chunk).map(move |in_chunk| PageCopy {
            block,
            in_chunk,
            page: chunk as u32 * per_chunk + in_chunk,
        })
    };
    (0..chunks).flat_map(of_chunk).collect()
}

/// The place in a block of each page of each plane, found by carrying the pieces out on paper.
fn carried(layout: &PagedLayout, division: &Division, half_bytes: u64) -> BTreeMap<(u32, u32), u64> {
    let mut places = BTreeMap::new();
    for piece in &division.pieces {
        for placed in &division.pages[piece.pages.clone()] {
            for plane in piece.planes.clone() {
                let in_plane = u64::from(plane) * layout.plane_bytes();
                let place = match placed.at {
                    At::Block(place) => place.offset + in_plane,
                    At::Staged(at) => {
                        let staged = at.wrapping_add(in_plane);
                        let end = staged + layout.page_bytes();
                        assert!(end <= half_bytes.max(layout.plane_bytes()), "beyond the staging buffer");
                        let span = piece
                            .spans
                            .iter()
                            .find(|span| span.staged <= staged && end <= span.staged + span.bytes);
                        let span = span.expect("every page is in a span");
                        span.place.offset + (staged - span.staged)
                    }
                };
                assert!(places.insert((placed.page, plane), place).is_none(), "copied twice");
            }
        }
    }
    places
}

#[test]
fn every_page_of_every_plane_is_copied_once_to_its_place() {
    for (name, layout, _) in layouts() {
        let pages = pages(&layout, 5);
        let expected: BTreeMap<_, _> = pages
            .iter()
            .flat_map(|copy| {
                let planes = layout.planes_of(&(1..4));
                let layout = &layout;
                planes.map(move |plane| {
                    ((copy.page, plane), copy.block.offset + layout.in_block(plane, copy.in_chunk))
                })
            })
            .collect();
        for by_layer in [false, true] {
            let direct = divide(&layout, &pages, 1..4, by_layer, Form::Direct, 0);
            assert_eq!(carried(&layout, &direct, 0), expected, "{name}");
            for half in [1, layout.plane_bytes() * 2, layout.block_bytes() * 2, 1 << 30] {
                let staged = divide(&layout, &pages, 1..4, by_layer, Form::Staged, half);
                assert_eq!(carried(&layout, &staged, half), expected, "{name}, halves of {half}");
            }
        }
    }
}

#[test]
fn blocks_one_behind_the_other_are_one_copy_when_they_are_whole() {
    let (_, layout, _) = layouts().swap_remove(0);
    // Blocks stand at 0, 1, 3, 4, 6 times their size.
    let division = divide(&layout, &pages(&layout, 5), 0..4, false, Form::Staged, 1 << 30);
    let spans: Vec<_> =
        division.pieces[0].spans.iter().map(|span| span.bytes / layout.block_bytes()).collect();
    assert_eq!((division.pieces.len(), spans), (1, vec![2, 2, 1]));
}

#[test]
fn layers_are_told_in_order_after_their_last_piece() {
    for form in [Form::Direct, Form::Staged] {
        let (_, layout, _) = layouts().swap_remove(0);
        let division = divide(&layout, &pages(&layout, 5), 1..4, true, form, layout.plane_bytes() * 2);
        let mut copied = BTreeSet::new();
        let mut told = Vec::new();
        for piece in &division.pieces {
            for placed in &division.pages[piece.pages.clone()] {
                copied.extend(piece.planes.clone().map(|plane| (plane, placed.page)));
            }
            if let Some(done) = piece.layers_done {
                assert_eq!(copied.len(), done as usize * 10);
                told.push(done);
            }
        }
        assert_eq!(told, [1, 2, 3]);
    }
}

#[test]
fn a_chunk_that_lacks_a_page_is_not_whole() {
    let (_, layout, _) = layouts().swap_remove(0);
    let mut pages = pages(&layout, 3);
    assert!(has_whole_chunks(&layout, &pages));
    pages.swap(0, 1);
    assert!(!has_whole_chunks(&layout, &pages));
    pages.swap(0, 1);
    pages.remove(2);
    assert!(!has_whole_chunks(&layout, &pages));
}
