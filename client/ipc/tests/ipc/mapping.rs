//! Shared memory that may and may not be mapped.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use larder_ipc::{Mapping, MappingError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// A memory file with these bytes.
fn memory_file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("larder-test", flags).unwrap());
    file.write_all(bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

fn sealed(bytes: &[u8]) -> OwnedFd {
    memory_file(bytes, SealFlags::SHRINK | SealFlags::GROW)
}

/// Bytes that differ by position.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7) as u8).collect()
}

#[test]
fn what_is_copied_in_is_copied_out_of_another_mapping() {
    let file = sealed(&[0; 10_000]);
    let writer = Mapping::writable(file.as_fd(), 10_000).unwrap();
    let reader = Mapping::read_only(file.as_fd(), 10_000).unwrap();
    writer.copy_from(8_000, &pattern(2_000));
    let mut out = vec![0; 2_000];
    reader.copy_to(8_000, &mut out);
    assert_eq!(out, pattern(2_000));
    assert!(writer.is_writable() && !reader.is_writable());
}

#[test]
fn copies_beyond_the_end_or_into_read_only_memory_panic() {
    let file = sealed(&[0; 100]);
    let writer = Mapping::writable(file.as_fd(), 100).unwrap();
    let reader = Mapping::read_only(file.as_fd(), 100).unwrap();
    writer.copy_from(100, &[]);
    assert!(catch_unwind(AssertUnwindSafe(|| writer.copy_from(99, &[1, 2]))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| reader.copy_to(u64::MAX, &mut [0]))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| reader.copy_from(0, &[1]))).is_err());
}

#[test]
fn memory_that_its_owner_may_shrink_is_refused() {
    let file = memory_file(&[0; 100], SealFlags::GROW);
    assert!(matches!(Mapping::read_only(file.as_fd(), 100), Err(MappingError::Unsealed)));
    let file = tempfile::tempfile().unwrap();
    file.set_len(100).unwrap();
    assert!(matches!(Mapping::read_only(file.as_fd(), 100), Err(MappingError::Unsealed)));
}

#[test]
fn memory_of_another_size_is_refused() {
    let file = sealed(&[0; 100]);
    for announced in [0, 99, 101, u64::MAX] {
        let mapping = Mapping::read_only(file.as_fd(), announced);
        assert!(matches!(mapping, Err(MappingError::WrongSize { found: 100, .. })), "{announced}");
    }
}

#[test]
fn a_pipe_is_no_memory() {
    let (pipe, _writer) = std::io::pipe().unwrap();
    assert!(matches!(Mapping::read_only(pipe.as_fd(), 100), Err(MappingError::NotAFile)));
}

#[test]
fn memory_sealed_against_writing_is_mapped_read_only_alone() {
    let file = memory_file(&[7; 100], SealFlags::SHRINK | SealFlags::FUTURE_WRITE);
    assert!(matches!(Mapping::writable(file.as_fd(), 100), Err(MappingError::Os { what: "map", .. })));
    assert!(Mapping::read_only(file.as_fd(), 100).is_ok());
}

#[test]
fn forked_children_do_not_inherit_a_mapping() {
    let file = sealed(&[0; 4_096]);
    let mapping = Mapping::read_only(file.as_fd(), 4_096).unwrap();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", mapping.as_ptr() as usize);
    let flags =
        smaps.lines().skip_while(|line| !line.starts_with(&start)).find(|line| line.starts_with("VmFlags"));
    assert!(flags.unwrap().split(' ').any(|flag| flag == "dc"), "{flags:?}");
}
