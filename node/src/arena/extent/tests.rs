//! Tests of one extent.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate};
use rustix::io::pwrite;

use super::*;
use crate::arena::MIN_EXTENT_BYTES;
use crate::window::Window;

const SEALED: ExtentSpec = ExtentSpec {
    bytes: MIN_EXTENT_BYTES,
    numa_node: None,
    binding: Binding::Strict,
    huge_pages: HugePages::Never,
    trust_engines: false,
};
const TRUSTED: ExtentSpec = ExtentSpec { trust_engines: true, ..SEALED };

/// The extent as an engine maps it.
fn mapped(extent: &ExtentMemory, access: Access) -> Result<Mapping, Errno> {
    Mapping::new(extent.descriptor(), extent.bytes(), access)
}

/// Opens the extent's file anew, as any holder of the descriptor can.
fn reopened(extent: &ExtentMemory, write: bool) -> std::io::Result<File> {
    let path = format!("/proc/self/fd/{}", extent.descriptor().as_raw_fd());
    OpenOptions::new().read(true).write(write).open(path)
}

fn window_with(bytes: &[u8]) -> Window {
    let window = Window::create(bytes.len() as u64, None, None).unwrap();
    Mapping::new(window.descriptor(), window.bytes(), Access::Write).unwrap().write(0, bytes).unwrap();
    window
}

#[test]
fn an_engine_sees_what_the_node_writes_and_cannot_write_itself() {
    let extent = SEALED.create().unwrap();
    let engine = mapped(&extent, Access::Read).unwrap();
    extent.copy_in_from(window_with(b"block").mapping(), 0, 5000, 5, &mut RangeChecksum::new()).unwrap();
    let mut seen = [0; 5];
    engine.read(5000, &mut seen).unwrap();
    assert_eq!(&seen, b"block");

    assert_eq!(mapped(&extent, Access::Write).map(|_| ()), Err(Errno::PERM));
    assert_eq!(engine.make_writable(), Err(Errno::ACCESS));
    assert_eq!(pwrite(extent.descriptor(), b"x", 0), Err(Errno::PERM));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(extent.descriptor(), hole, 0, 4096), Err(Errno::PERM));
}

#[test]
fn nobody_changes_the_size_or_the_seals_of_an_extent() {
    for spec in [SEALED, TRUSTED] {
        let extent = spec.create().unwrap();
        assert_eq!(ftruncate(extent.descriptor(), 0), Err(Errno::PERM));
        assert_eq!(ftruncate(extent.descriptor(), 1 << 30), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(extent.descriptor(), SealFlags::WRITE), Err(Errno::PERM));
        assert!(fcntl_get_seals(extent.descriptor()).unwrap().contains(SealFlags::SEAL));
    }
}

#[test]
fn opening_the_file_again_gives_no_more_rights() {
    let extent = SEALED.create().unwrap();
    let file = reopened(&extent, true).expect("its owner may open it: the seals must hold");
    assert_eq!(Mapping::new(file.as_fd(), extent.bytes(), Access::Write).map(|_| ()), Err(Errno::PERM));
    assert_eq!(pwrite(&file, b"x", 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
}

#[test]
fn a_descriptor_does_not_outlive_an_exec() {
    let extent = SEALED.create().unwrap();
    let flags = rustix::io::fcntl_getfd(extent.descriptor()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    assert!(rustix::fs::fcntl_getfl(extent.descriptor()).unwrap().contains(OFlags::RDWR));
}

#[test]
fn a_trusted_engine_writes_and_the_node_reads_copies_only() {
    let extent = TRUSTED.create().unwrap();
    mapped(&extent, Access::Write).unwrap().write(9, b"block").unwrap();
    let mut seen = [0; 5];
    extent.copy_out(9, &mut seen).unwrap();
    assert_eq!(&seen, b"block");
    // SAFETY: nobody writes, and no slice is returned.
    assert_eq!(unsafe { extent.bytes_at(9, 5) }, Ok(None));
}

#[test]
fn bytes_that_no_engine_can_write_are_read_in_place() {
    let extent = SEALED.create().unwrap();
    extent.copy_in_from(window_with(b"block").mapping(), 0, 100, 5, &mut RangeChecksum::new()).unwrap();
    // SAFETY: the copy is done, and there is no other copy.
    assert_eq!(unsafe { extent.bytes_at(100, 5) }, Ok(Some(b"block".as_slice())));
}

#[test]
fn a_place_outside_of_an_extent_is_refused() {
    let extent = SEALED.create().unwrap();
    let size = extent.bytes();
    let window = window_with(b"block");
    assert_eq!(
        extent.copy_in_from(window.mapping(), 0, size - 4, 5, &mut RangeChecksum::new()),
        Err(OutOfBounds { offset: size - 4, bytes: 5, size })
    );
    let past = OutOfBounds { offset: 4000, bytes: 4096, size: 4096 };
    assert_eq!(extent.copy_in_from(window.mapping(), 4000, 0, 4096, &mut RangeChecksum::new()), Err(past));
    assert_eq!(extent.copy_out(u64::MAX, &mut [0]), Err(OutOfBounds { offset: u64::MAX, bytes: 1, size }));
    assert_eq!(extent.check(size, 0), Ok(()));
}

#[test]
fn a_mapping_that_somebody_kept_shows_nothing_of_a_renewed_extent() {
    let extent = SEALED.create().unwrap();
    extent.copy_in_from(window_with(b"mine!").mapping(), 0, 0, 5, &mut RangeChecksum::new()).unwrap();
    let kept = mapped(&extent, Access::Read).unwrap();
    let renewal = Renewal { extent: 0, spec: SEALED, old: Some(Arc::new(extent)) };
    let renewed = renewal.perform().unwrap();

    let mut seen = [1; 5];
    renewed.copy_out(0, &mut seen).unwrap();
    assert_eq!(seen, [0; 5], "the new tenant sees nothing of the old one");
    renewed.copy_in_from(window_with(b"yours").mapping(), 0, 0, 5, &mut RangeChecksum::new()).unwrap();
    kept.read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"mine!", "the old tenant sees nothing of the new one");
}

#[test]
fn without_huge_pages_an_extent_is_made_of_ordinary_ones() {
    let auto = ExtentSpec { huge_pages: HugePages::Auto, ..SEALED };
    let odd = ExtentSpec { bytes: MIN_EXTENT_BYTES + 4096, ..auto };
    assert_eq!(odd.create().unwrap().pages(), Pages::Ordinary, "no whole number of huge pages");
    let extent = auto.create().unwrap();
    assert_eq!(mapped(&extent, Access::Write).map(|_| ()), Err(Errno::PERM), "either way it is sealed");
    assert_eq!(SEALED.create().unwrap().pages(), Pages::Ordinary);
}
