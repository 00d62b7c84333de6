//! Layouts: every engine's is taken, with each byte once; what is unknown, unaligned or overlapping is refused.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const SHAPE: Shape =
    Shape { layers: 3, pages: 5, heads: 4, tokens: 8, content_bytes: 32, pages_per_chunk: 2 };

/// The reference: where each of vLLM's elements stands, from the definition of its order, by an index in each dimension.
fn reference(order: VllmOrder, shape: &Shape, plane: u32, page: u32) -> Vec<u64> {
    let size = |letter| match letter {
        'L' => u64::from(shape.layers),
        'B' => shape.pages.into(),
        'H' => shape.heads.into(),
        'N' => shape.tokens.into(),
        _ => shape.content_bytes,
    };
    let inner: Vec<char> = order.name().chars().filter(|letter| matches!(letter, 'H' | 'N')).collect();
    let mut places = Vec::new();
    for outer in 0..size(inner[0]) {
        for second in 0..size(inner[1]) {
            for content in 0..shape.content_bytes {
                let index = |letter| match letter {
                    'L' => u64::from(plane),
                    'B' => page.into(),
                    'C' => content,
                    letter if letter == inner[0] => outer,
                    _ => second,
                };
                places.push(order.name().chars().fold(0, |at, letter| at * size(letter) + index(letter)));
            }
        }
    }
    places
}

#[test]
fn each_of_vllms_orders_has_every_byte_where_its_definition_says() {
    for order in VllmOrder::ALL {
        let (spec, regions) = vllm(order, &SHAPE);
        let layout = PagedLayout::new(spec, &regions).unwrap();
        for (plane, page) in [(0, 0), (1, 3), (2, 4)] {
            let places: Vec<u64> = layout.runs(plane, page).flat_map(|run| run.range).collect();
            assert_eq!(places, reference(order, &SHAPE, plane, page), "{}", order.name());
        }
    }
}

#[test]
fn every_layout_has_each_byte_of_its_regions_exactly_once() {
    let latent = Shape { heads: 1, content_bytes: 1_152, ..SHAPE };
    let mut layouts: Vec<_> = VllmOrder::ALL.iter().map(|&order| vllm(order, &SHAPE)).collect();
    layouts.extend(VllmOrder::ALL.iter().map(|&order| vllm(order, &latent)));
    layouts.extend([sglang_split(&SHAPE), sglang_latent(&latent)]);
    for (spec, regions) in layouts {
        let layout = PagedLayout::new(spec, &regions).unwrap();
        let mut seen = HashSet::new();
        for plane in 0..layout.spec().planes.len() as u32 {
            for page in 0..layout.spec().pages {
                let mut in_page = 0;
                for run in layout.runs(plane, page) {
                    assert_eq!(run.in_page, in_page);
                    in_page += run.range.end - run.range.start;
                    assert!(run.range.step_by(16).all(|at| seen.insert((run.region, at))));
                }
                assert_eq!(in_page, layout.page_bytes());
            }
        }
        assert_eq!(seen.len() as u64 * 16, regions.iter().sum::<u64>());
    }
}

#[test]
fn an_unknown_order_is_refused() {
    assert_eq!("LBHCN".parse::<VllmOrder>(), Err(LayoutError::UnknownOrder("LBHCN".into())));
    assert_eq!("BHLNC".parse(), Ok(VllmOrder::Bhlnc));
}

#[test]
fn a_layout_with_anything_wrong_is_refused() {
    type Spoil = fn(&mut LayoutSpec);
    let cases: [(Spoil, LayoutError); 10] = [
        (|spec| spec.planes.clear(), LayoutError::Empty("planes")),
        (|spec| spec.pages = 0, LayoutError::Empty("pages")),
        (|spec| spec.run_bytes = 0, LayoutError::Empty("bytes in a run")),
        (|spec| spec.dims = vec![Dim { count: 0, stride: 16 }], LayoutError::Empty("runs in a page")),
        (|spec| spec.dims = vec![Dim { count: 1, stride: 16 }; 3], LayoutError::TooMany("dimensions")),
        (|spec| spec.planes_per_layer = 2, LayoutError::BrokenLayer { planes: 3, per_layer: 2 }),
        (
            |spec| spec.planes[1].offset += 8,
            LayoutError::Unaligned { what: "offset of a plane", bytes: 5_128 },
        ),
        (|spec| spec.run_bytes = 24, LayoutError::Unaligned { what: "run", bytes: 24 }),
        (
            |spec| spec.planes[2].offset += 16,
            LayoutError::OutOfRegion { plane: 2, region: 0, needed: 15_376, found: 15_360 },
        ),
        (|spec| spec.planes[1].page_stride -= 16, LayoutError::PagesOverlap(1)),
    ];
    for (spoil, expected) in cases {
        let (mut spec, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
        spoil(&mut spec);
        assert_eq!(PagedLayout::new(spec, &regions), Err(expected));
    }
    let (mut spec, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
    spec.planes[0].region = 1;
    let error = PagedLayout::new(spec, &regions).unwrap_err();
    assert!(matches!(error, LayoutError::OutOfRegion { plane: 0, region: 1, found: 0, .. }), "{error}");
}

#[test]
fn layers_of_several_groups_may_lie_over_each_other() {
    let (mut spec, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
    spec.planes[1] = spec.planes[0];
    assert!(PagedLayout::new(spec, &regions).is_ok());
}

proptest! {
    /// Compares the checks of small layouts of any strides with a count of every byte. A plane of an accepted layout has no byte
    /// twice. A plane that is refused as overlapping has a byte twice, or interleaves in a way that no engine does.
    #[test]
    fn no_plane_that_is_taken_has_a_byte_twice(
        offset in 0u64..40,
        page_stride in 0u64..12,
        dims in proptest::collection::vec((1u32..4, 0u64..12), 0..3),
        run in 1u64..4,
    ) {
        let spec = LayoutSpec {
            planes: vec![Plane { region: 0, offset: offset * 16, page_stride: page_stride * 16 }],
            planes_per_layer: 1,
            pages: 3,
            pages_per_chunk: 1,
            dims: dims.iter().map(|&(count, stride)| Dim { count, stride: stride * 16 }).collect(),
            run_bytes: run * 16,
        };
        let unchecked = PagedLayout {
            page_bytes: spec.dims.iter().fold(spec.run_bytes, |bytes, dim| bytes * u64::from(dim.count)),
            block_bytes: 0,
            spec: spec.clone(),
        };
        let mut seen = HashSet::new();
        let is_apart = (0..spec.pages).all(|page| {
            unchecked.runs(0, page).flat_map(|run| run.range.step_by(16)).all(|at| seen.insert(at))
        });
        match PagedLayout::new(spec, &[1 << 20]) {
            Ok(_) => prop_assert!(is_apart),
            Err(LayoutError::PagesOverlap(_)) => {}
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}
