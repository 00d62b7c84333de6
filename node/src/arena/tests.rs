//! Tests of the arena.

use super::*;
use crate::threads::pinned_to;

const SPEC: ExtentSpec = ExtentSpec {
    bytes: 2 << 20,
    numa_node: Some(0),
    binding: Binding::Strict,
    huge_pages: HugePages::Never,
    trust_engines: false,
};

pub(crate) fn limits(extents: u32) -> ArenaLimits {
    ArenaLimits { extents, extent: SPEC, fault_threads: 2, cpus: pinned_to().unwrap() }
}

/// A small arena, sealed as usual.
pub(crate) fn arena(extents: u32) -> Arena {
    arena_of(extents, SPEC).unwrap()
}

fn arena_of(extents: u32, extent: ExtentSpec) -> Result<Arena, MemoryError> {
    Arena::create(&ArenaLimits { extent, ..limits(extents) })
}

/// A small arena that engines may write.
pub(crate) fn trusted_arena(extents: u32) -> Arena {
    arena_of(extents, ExtentSpec { trust_engines: true, ..SPEC }).unwrap()
}

#[test]
fn all_memory_is_faulted_in_before_it_is_handed_out() {
    let arena = arena(5);
    assert_eq!(
        (arena.extents.len(), arena.placement().bytes, arena.placement().absent_pages),
        (5, 10 << 20, 0)
    );
}

#[test]
fn memory_is_where_it_was_asked_for() {
    let placement = arena(3).placement();
    assert_eq!((placement.asked, placement.bytes, placement.huge_bytes), (Some(0), 6 << 20, 0));
    assert_eq!((placement.misplaced_pages(), placement.bytes_on(0)), (0, 6 << 20));
    assert!(placement.sampled_pages() >= 48);
}

#[test]
fn preferred_memory_is_where_it_was_asked_for_as_long_as_there_is_any() {
    let arena = arena_of(2, ExtentSpec { binding: Binding::Preferred, ..SPEC }).unwrap();
    assert_eq!((arena.placement().misplaced_pages(), arena.placement().bytes_on(0)), (0, 4 << 20));
}

#[test]
fn memory_that_cannot_be_bound_is_taken_anyway_and_called_misplaced() {
    let arena = arena_of(2, ExtentSpec { numa_node: Some(1023), ..SPEC }).unwrap();
    let placement = arena.placement();
    assert_eq!(placement.misplaced_pages(), placement.sampled_pages());
}

#[test]
fn an_arena_larger_than_the_address_space_is_refused_with_what_to_lower() {
    let error = arena_of(2, ExtentSpec { bytes: 1 << 62, ..SPEC }).unwrap_err();
    assert!(matches!(error, MemoryError::Map { bytes, .. } if bytes == 1 << 62), "{error:?}");
    assert!(error.to_string().contains("lower [host] arena_bytes"));
}

#[test]
fn a_renewed_extent_has_other_memory_and_the_others_keep_theirs() {
    let mut arena = arena(2);
    let (old, other) = (Arc::clone(arena.extent(0)), Arc::clone(arena.extent(1)));
    let memory = arena.vacate(0).perform().unwrap();
    arena.occupy(0, memory);
    assert!(!Arc::ptr_eq(arena.extent(0), &old) && Arc::ptr_eq(arena.extent(1), &other));
}

#[test]
fn a_failed_renewal_can_be_tried_again() {
    let mut arena = arena(2);
    drop(arena.vacate(1));
    let memory = arena.vacate(1).perform().unwrap();
    arena.occupy(1, memory);
    assert_eq!(arena.placement().bytes, 4 << 20);
}

#[test]
#[should_panic(expected = "a vacated extent has no slots")]
fn nobody_gets_the_memory_of_a_vacated_extent() {
    let mut arena = arena(2);
    let _renewal = arena.vacate(0);
    let _memory = arena.extent(0);
}

#[test]
fn children_of_the_node_get_neither_arena_nor_windows() {
    let _arena = arena(2);
    let _window = crate::window::Window::create(4096, None, None).unwrap();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut of_larder = None;
    let mut flags = Vec::new();
    for line in smaps.lines() {
        if line.contains("/memfd:larder-") {
            of_larder = Some(line);
        } else if let Some(found) = line.strip_prefix("VmFlags:")
            && let Some(mapping) = of_larder.take()
        {
            flags.push((mapping, found));
        }
    }
    assert_eq!(flags.len(), 3);
    for (mapping, flags) in flags {
        assert!(flags.contains(" dc "), "{mapping} would be copied at fork: {flags}");
        assert!(flags.contains(" dd "), "{mapping} would be in core files: {flags}");
    }
}
