//! Opening a tier: the owner of the folder, its contents, its size, and the time that opening takes.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;

use super::*;
use crate::clock::Clock;
use crate::disk::format::{Footer, FooterEntry, SegmentHeader, StorageId, Superblock};

fn refused(options: &DiskOptions) -> String {
    DiskTier::open(options, metrics(), gone().0).err().expect("the tier must not open").to_string()
}

/// Overwrites bytes of a tier's file.
fn overwrite(folder: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(folder.join("larder.disk")).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

fn fill(folder: &Path, chunks: std::ops::Range<u64>) {
    let (tier, mut slots) = (open(folder), Slots::new());
    for number in chunks {
        let answer = tier.write(slots.write_order(TestChunk(number))).unwrap();
        assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
    }
}

fn hits(options: &DiskOptions, chunks: std::ops::Range<u64>) -> usize {
    let (tier, slots) = (DiskTier::open(options, metrics(), gone().0).unwrap(), Slots::new());
    let is_here = |&number: &u64| {
        let answer = tier.read(slots.read_order(TestChunk(number))).unwrap().blocking_recv().unwrap();
        matches!(answer, ReadAnswer::Here { .. })
    };
    chunks.filter(is_here).count()
}

#[test]
fn a_folder_has_one_owner_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let owner = open(folder.path());
    let error = refused(&options(folder.path()));
    assert!(error.contains("give each node a folder of its own"), "{error}");
    drop(owner);
    open(folder.path());
}

#[test]
fn what_is_no_tier_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    for content in [b"a letter".to_vec(), vec![b'x'; 100_000]] {
        std::fs::write(folder.path().join("larder.disk"), &content).unwrap();
        let error = refused(&options(folder.path()));
        assert!(error.contains("is no disk tier of Larder"), "{error}");
        assert_eq!(std::fs::read(folder.path().join("larder.disk")).unwrap(), content);
    }
}

#[test]
fn another_version_of_the_format_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    drop(open(folder.path()));
    for copy in 0..2 {
        overwrite(folder.path(), copy * PAGE_BYTES + 8, &7_u16.to_le_bytes());
    }
    let error = refused(&options(folder.path()));
    assert!(error.contains("format version 7, this build reads 1"), "{error}");
}

#[test]
fn one_copy_of_the_superblock_is_enough_and_the_other_is_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), 0..3);
    for copy in [0, 1, 0] {
        overwrite(folder.path(), copy * PAGE_BYTES + 20, b"damage");
        assert_eq!(hits(&options(folder.path()), 0..3), 3);
    }
}

#[test]
fn segments_of_another_size_and_impossible_sizes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    drop(open(folder.path()));
    let good = options(folder.path());
    let error = refused(&DiskOptions { segment_bytes: 2 * SEGMENT_BYTES, ..good.clone() });
    assert!(error.contains(&format!("has segments of {}, not", ByteSize(SEGMENT_BYTES))), "{error}");
    for impossible in [
        DiskOptions { segment_bytes: SEGMENT_BYTES + 1, ..good.clone() },
        DiskOptions { segment_bytes: 0, ..good.clone() },
        DiskOptions { capacity_bytes: 3 * SEGMENT_BYTES, ..good.clone() },
        DiskOptions { capacity_bytes: u64::MAX, ..good.clone() },
    ] {
        assert!(refused(&impossible).contains("it needs at least"));
    }
}

/// Bytes that a file takes on its drive.
fn taken(folder: &Path) -> u64 {
    std::fs::metadata(folder.join("larder.disk")).unwrap().blocks() * 512
}

#[test]
fn a_tier_that_does_not_fit_is_refused_at_every_start_and_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let segment_bytes = MAX_SEGMENT_BYTES;
    // A sparse file of this length is possible, so only the missing space is in the way.
    let too_large =
        DiskOptions { capacity_bytes: 700 * segment_bytes, segment_bytes, ..options(folder.path()) };
    for _ in ["the first start", "the next"] {
        let error = refused(&too_large);
        assert!(error.contains("lower the capacity"), "{error}");
        assert_eq!(taken(folder.path()), 0);
    }
    open(folder.path());
}

#[test]
fn a_tier_with_holes_gets_its_space_when_it_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), 0..3);
    let whole = options(folder.path()).geometry().unwrap().file_bytes();
    let path = folder.path().join("larder.disk");
    let copy = folder.path().join("copy");
    assert!(Command::new("cp").arg("--sparse=always").args([&path, &copy]).status().unwrap().success());
    std::fs::rename(copy, path).unwrap();
    assert!(taken(folder.path()) < whole);
    assert_eq!(hits(&options(folder.path()), 0..3), 3);
    assert!(taken(folder.path()) >= whole);
}

#[test]
fn a_tier_belongs_to_its_user_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let inner = folder.path().join("made/anew");
    drop(open(&inner));
    let file = inner.join("larder.disk");
    assert_eq!((mode(&inner), mode(&file)), (0o700, 0o600));
    // A file of an earlier build.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    drop(open(&inner));
    assert_eq!(mode(&file), 0o600);
}

type TakeAway = fn(&Path);

#[test]
fn a_tier_whose_file_is_taken_away_closes_itself_and_says_why() {
    let removed = |folder: &Path| std::fs::remove_dir_all(folder).unwrap();
    let moved = |folder: &Path| std::fs::rename(folder, folder.with_extension("old")).unwrap();
    let replaced = |folder: &Path| {
        std::fs::copy(folder.join("larder.disk"), folder.join("other")).unwrap();
        std::fs::rename(folder.join("other"), folder.join("larder.disk")).unwrap();
    };
    let cut = |folder: &Path| drop(File::create(folder.join("larder.disk")).unwrap());
    let ways: [(TakeAway, &str); 4] = [
        (removed, "was removed while the node runs"),
        (moved, "is not there any more"),
        (replaced, "was removed while the node runs"),
        (cut, "was shortened while the node runs"),
    ];
    for (take_away, says) in ways {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("tier");
        let (metrics, (on_gone, gone)) = (metrics(), gone());
        let tier = DiskTier::open(&options(&folder), metrics.clone(), on_gone).unwrap();
        let mut slots = Slots::new();
        let answer = tier.write(slots.write_order(TestChunk(1))).unwrap();
        assert_eq!((answer.blocking_recv(), tier.trouble()), (Ok(WriteAnswer::Durable), None));
        take_away(&folder);
        assert_eq!(gone.recv().unwrap().why, Why::Closed);
        while !tier.is_closed() {
            std::thread::yield_now();
        }
        assert!(tier.trouble().unwrap().contains(says), "{:?}", tier.trouble());
        assert_eq!(metrics.closed.get(), 1);
        assert!(matches!(tier.write(slots.write_order(TestChunk(2))), Err(Refused::Closed)));
    }
}

#[test]
fn a_tier_grows_and_shrinks_with_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), 0..6);
    let good = options(folder.path());
    let larger = DiskOptions { capacity_bytes: 2 * good.capacity_bytes, ..good.clone() };
    assert_eq!(hits(&larger, 0..6), 6);
    let bytes = std::fs::metadata(folder.path().join("larder.disk")).unwrap().len();
    assert_eq!(bytes, larger.geometry().unwrap().file_bytes());
    let smaller = DiskOptions { capacity_bytes: 4 * SEGMENT_BYTES, ..good };
    assert_eq!(hits(&smaller, 0..6), 6, "the first segments stay");
}

#[test]
fn a_segment_without_a_right_footer_or_header_is_searched() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), 0..25);
    let good = options(folder.path());
    assert_eq!(hits(&good, 0..25), 25);
    let geometry = good.geometry().unwrap();
    // Damages the header of the first segment, and the footer of the second.
    overwrite(folder.path(), geometry.offset(0, 0) + 33, b"damage");
    overwrite(folder.path(), geometry.offset(2, 0) - 20, b"damage");
    assert_eq!(hits(&good, 0..25), 25);
    assert_eq!(hits(&good, 0..25), 25, "and is whole again");
}

#[test]
fn a_segment_of_another_version_is_taken_for_an_empty_one() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), 0..25);
    let good = options(folder.path());
    let (first, end) = (good.geometry().unwrap().offset(0, 0), good.geometry().unwrap().offset(1, 0));
    for page in (first..end).step_by(PAGE_BYTES as usize) {
        overwrite(folder.path(), page + 8, &7_u16.to_le_bytes());
    }
    let left = hits(&good, 0..25);
    assert!((15..25).contains(&left), "{left} of 25");
}

#[test]
fn a_large_tier_opens_by_reading_footers_alone() {
    let folder = tempfile::tempdir().unwrap();
    let segment_bytes = 16 << 20;
    let options = DiskOptions { capacity_bytes: 1 << 30, segment_bytes, ..options(folder.path()) };
    let geometry = options.geometry().unwrap();
    let records = sparse_tier(&folder.path().join("larder.disk"), geometry);
    let (clock, metrics) = (Clock::start(), metrics());
    let tier = DiskTier::open(&options, metrics.clone(), gone().0).unwrap();
    println!(
        "1 GiB, {} segments, {records} records: open after {:.3} s, {} bytes read",
        geometry.segments,
        clock.elapsed().as_secs_f64(),
        metrics.read_bytes.get()
    );
    // The tier may have given up a segment ahead of need by now.
    let records_of_segment = records as i64 / i64::from(geometry.segments) + 1;
    assert!((records as i64 - records_of_segment * 2..=records as i64).contains(&metrics.records.get()));
    assert!(metrics.read_bytes.get() < 20 << 20, "one segment was open");
    drop(tier);
}

/// A tier whose segments are all sealed but the last two. Its records of 1 MiB exist only as entries in the footers. Returns the
/// number of records.
fn sparse_tier(path: &Path, geometry: Geometry) -> usize {
    let storage = StorageId([3; 16]);
    let file = File::create(path).unwrap();
    file.set_len(geometry.file_bytes()).unwrap();
    let segment_bytes = u64::from(geometry.segment_pages) * PAGE_BYTES;
    let superblock = Superblock { storage, segment_bytes, segments: geometry.segments };
    file.write_all_at(&superblock.encode(), 0).unwrap();
    let mut records = 0;
    for segment in 0..geometry.segments - 2 {
        let header = SegmentHeader { segment, sequence: u64::from(segment) + 1 };
        let entries: Vec<FooterEntry> = (0..RECORDS)
            .map(|number| {
                records += 1;
                let chunk = TestChunk(records as u64);
                let (fingerprint, sequence) = (chunk.key().fingerprint, records as u64);
                FooterEntry {
                    fingerprint,
                    chunk: chunk.chunk_ref(),
                    page: 1 + number * 257,
                    pages: 257,
                    pools: PoolSet::first(1),
                    sequence,
                }
            })
            .collect();
        let footer = Footer { segment: header, end_page: 1 + RECORDS * 257, entries }.encode(storage);
        file.write_all_at(&header.encode(storage), geometry.offset(segment, 0)).unwrap();
        file.write_all_at(&footer, geometry.offset(segment + 1, 0) - footer.len() as u64).unwrap();
    }
    // A segment that was open when its process was killed: all of it is searched.
    let open = SegmentHeader { segment: geometry.segments - 2, sequence: 1_000 };
    file.write_all_at(&open.encode(storage), geometry.offset(open.segment, 0)).unwrap();
    records
}

/// Records of a page and 1 MiB that fit into a segment of 16 MiB, beside header and footer.
const RECORDS: u32 = 15;
