//! The coordinator's state on disk, in one embedded store.

use std::fs::OpenOptions;
use std::io;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use larder_net::blocking::blocking;
use larder_net::failure::Failure;
use larder_protocol::v1;
use redb::{Database, ReadableDatabase as _, TableDefinition};
use rkyv::rancor;
use rkyv::util::AlignedVec;
use tempfile::NamedTempFile;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::membership::{DurableState, Lost};

/// The store.
#[derive(Debug)]
pub struct StateFile {
    database: Database,
    path: PathBuf,
}

/// Writes states on a thread of its own, so that a slow disk delays tables, and neither nodes nor elections.
#[derive(Debug)]
pub struct StateWriter {
    file: Arc<StateFile>,
    under_way: Arc<Mutex<()>>,
    others_lead: bool,
    patience: Duration,
}

impl StateWriter {
    /// Opens the file, or makes it, and reads the state. If other coordinators may lead, the writer waits for [`DISK_PATIENCE`]
    /// only.
    ///
    /// # Errors
    /// The file cannot be opened, or is damaged.
    pub fn open(path: &Path, others_lead: bool) -> Result<(Self, DurableState), Failure> {
        let (file, state) = StateFile::open(path)?;
        let writer =
            Self { file: Arc::new(file), under_way: Arc::default(), others_lead, patience: DISK_PATIENCE };
        Ok((writer, state))
    }

    /// Writes a state; it is on disk when this returns.
    ///
    /// # Errors
    /// The file cannot be written, or the disk takes too long.
    ///
    /// # Cancel safety
    /// If dropped, the write goes on.
    pub async fn write(&self, state: DurableState) -> Result<(), Failure> {
        let under_way = Arc::clone(&self.under_way).lock_owned().await;
        let file = Arc::clone(&self.file);
        let mut writing = pin!(blocking(move || {
            // The file is closed before others hear of the end.
            let (_under_way, file) = (under_way, file);
            file.write(&state)
        }));
        if let Ok(written) = timeout(self.patience, &mut writing).await {
            return written;
        }
        let path = self.file.path.display();
        if self.others_lead {
            return Err(Failure::new(format!(
                "the disk of the state {path} has not answered for {} s: this coordinator ends, so that another leads; look at the disk, or set [state] path to another",
                self.patience.as_secs()
            )));
        }
        tracing::error!(%path, "the disk of the state does not answer: there is no new table until it does");
        writing.await
    }

    /// Waits a moment for a write that goes on.
    pub async fn end(self, within: Duration) {
        _ = timeout(within, self.under_way.lock()).await;
    }
}

impl StateFile {
    /// Opens the file, or makes it, and reads the state.
    ///
    /// # Errors
    /// The file cannot be opened, or is damaged.
    pub fn open(path: &Path) -> Result<(Self, DurableState), Failure> {
        let damaged = || damaged(path);
        let unopened = |error: redb::Error| {
            Failure::because(
                error,
                format!(
                    "cannot open the state {}: does another coordinator use it, and is it this program's file? If you move the file away, the coordinator makes a new one, and the nodes tell it their epoch",
                    path.display()
                ),
            )
        };
        let open = || {
            if !path.try_exists()? {
                make(path)?;
            }
            open(path)
        };
        // The store panics over some kinds of damage.
        let Opened { database, state, lost, void } =
            catch_unwind(open).map_err(|_| damaged())?.map_err(unopened)?;
        let mut state = match state {
            None => DurableState::default(),
            Some(bytes) => {
                rkyv::from_bytes::<DurableState, rancor::Error>(&aligned(&bytes)).map_err(|_| damaged())?
            }
        };
        if let Some(bytes) = lost {
            let lost = rkyv::from_bytes::<Vec<Lost>, rancor::Error>(&aligned(&bytes));
            state.lost = lost.map_err(|_| damaged())?;
        }
        if let Some(bytes) = void {
            let void = rkyv::from_bytes::<Vec<(String, u64)>, rancor::Error>(&aligned(&bytes));
            state.void = void.map_err(|_| damaged())?;
        }
        state.table = v1::table_today(state.table);
        if !state.table.is_consistent() {
            return Err(damaged());
        }
        Ok((Self { database, path: path.to_owned() }, state))
    }

    /// Writes the state; it is on disk when this returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, state: &DurableState) -> Result<(), Failure> {
        let damaged = |_| damaged(&self.path);
        let bytes = rkyv::to_bytes::<rancor::Error>(state).map_err(damaged)?;
        let lost = rkyv::to_bytes::<rancor::Error>(&state.lost).map_err(damaged)?;
        let void = rkyv::to_bytes::<rancor::Error>(&state.void).map_err(damaged)?;
        let write = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            write.open_table(TABLE)?.insert(KEY, bytes.as_slice())?;
            write.open_table(TABLE)?.insert(LOST_KEY, lost.as_slice())?;
            write.open_table(TABLE)?.insert(VOID_KEY, void.as_slice())?;
            write.commit()?;
            Ok(())
        };
        write().map_err(|error| {
            Failure::because(error, format!("cannot write the state {}", self.path.display()))
        })
    }
}

fn damaged(path: &Path) -> Failure {
    Failure::new(format!(
        "the state {} is damaged: move it away; the coordinator makes a new one, and the nodes tell it their epoch",
        path.display()
    ))
}

/// Makes the file whole before it gets its name, so that a coordinator that is killed meanwhile leaves no half file.
fn make(path: &Path) -> Result<(), redb::Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Only this user may read the file.
    let file = NamedTempFile::new_in(folder)?;
    drop(open(file.path())?);
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => Err(error.error.into()),
        // Another coordinator was faster.
        _ => Ok(()),
    }
}

/// Bytes of the file need an aligned copy.
fn aligned(bytes: &[u8]) -> AlignedVec<16> {
    let mut aligned = AlignedVec::with_capacity(bytes.len());
    aligned.extend_from_slice(bytes);
    aligned
}

/// An open store, and its values.
struct Opened {
    database: Database,
    state: Option<Vec<u8>>,
    lost: Option<Vec<u8>>,
    void: Option<Vec<u8>>,
}

/// Opens the store in a file.
fn open(path: &Path) -> Result<Opened, redb::Error> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut database = Database::builder().create_file(file)?;
    // Reads the whole file, so that damage is found now, and not by a later write.
    database.check_integrity()?;
    let write = database.begin_write()?;
    write.open_table(TABLE)?;
    write.commit()?;
    let read = database.begin_read()?;
    let table = read.open_table(TABLE)?;
    let bytes = |key| Ok::<_, redb::Error>(table.get(key)?.map(|value| value.value().to_vec()));
    let (state, lost, void) = (bytes(KEY)?, bytes(LOST_KEY)?, bytes(VOID_KEY)?);
    Ok(Opened { database, state, lost, void })
}

/// How long an elected coordinator waits for the disk. Then it ends, so that another leads.
pub const DISK_PATIENCE: Duration = Duration::from_secs(10);

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("larder coordinator 1");
const KEY: &str = "state";
const LOST_KEY: &str = "lost, and since when";
const VOID_KEY: &str = "lives that were removed";

#[cfg(test)]
mod tests {
    use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, PARTITIONS, RunKey, Table};

    use super::*;

    #[test]
    fn what_was_written_is_read_by_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let (file, empty) = StateFile::open(&path).unwrap();
        assert_eq!(empty, DurableState::default());
        let table = Table { epoch: Epoch { term: 3, number: 9 }, ..Table::default() };
        let numbers = vec![("a".into(), NodeNumber(4))];
        let members = golden(PARTITIONS.into()).table.members.into_iter();
        let lost = members.map(|member| Lost { member, heard: 3, removed: 4 }).collect();
        let void = vec![("a".into(), 7)];
        let state = DurableState { table, numbers, lost, void };
        file.write(&state).unwrap();
        drop(file);
        assert_eq!(StateFile::open(&path).unwrap().1, state);
    }

    #[test]
    fn a_file_without_lost_members_and_lives_that_were_removed_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let (file, _) = StateFile::open(&path).unwrap();
        let state = DurableState { numbers: vec![("a".into(), NodeNumber(4))], ..DurableState::default() };
        file.write(&state).unwrap();
        let write = file.database.begin_write().unwrap();
        for key in [LOST_KEY, VOID_KEY] {
            write.open_table(TABLE).unwrap().remove(key).unwrap();
        }
        write.commit().unwrap();
        drop(file);
        assert_eq!(StateFile::open(&path).unwrap().1, state);
    }

    #[tokio::test]
    async fn an_elected_coordinator_ends_when_its_disk_is_silent_and_another_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let state = DurableState { numbers: vec![("a".into(), NodeNumber(4))], ..DurableState::default() };
        for others_lead in [true, false] {
            let writer = StateWriter::open(&path, others_lead).unwrap().0;
            let writer = StateWriter { patience: Duration::from_millis(1), ..writer };
            let file = Arc::clone(&writer.file);
            // The next write waits for this one.
            let silent = file.database.begin_write().unwrap();
            let mut writing = Box::pin(writer.write(state.clone()));
            let waited = timeout(Duration::from_millis(50), &mut writing).await;
            assert_eq!(matches!(waited, Ok(Err(_))), others_lead);
            drop(silent);
            if !others_lead {
                writing.as_mut().await.unwrap();
            }
            drop(writing);
            writer.end(Duration::from_secs(60)).await;
            drop(file);
            assert_eq!(StateFile::open(&path).unwrap().1, state, "it was written in the end");
            StateFile::open(&path).unwrap().0.write(&DurableState::default()).unwrap();
        }
    }

    /// A state whose parts all differ from each other.
    fn golden(partitions: usize) -> DurableState {
        let member = |number: u16, state| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1_700_000_000_000_000 + u64::from(number),
            peer: ([10, 0, 0, number as u8], 9_441).into(),
            http: ([10, 0, 0, number as u8], 9_440).into(),
            devices: 2,
            weight: 1_024,
            state,
        };
        let members = vec![
            member(1, MemberState::Alive),
            member(2, MemberState::Suspect),
            member(4, MemberState::Alive),
        ];
        let homes =
            (0..partitions).map(|partition| NodeNumber([1, 2, 4][partition * 3 / partitions])).collect();
        let table = Table { epoch: Epoch { term: 7, number: 42 }, members, homes };
        let number = |number| (format!("node-{number}"), NodeNumber(number));
        DurableState { table, numbers: [3, 1, 2, 4].map(number).into(), ..DurableState::default() }
    }

    /// A file that a release wrote, from its lines: `OFFSET BYTES`, both in hex. Lines that equal the one before are left out.
    fn read(file: &str) -> DurableState {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
        let lines = std::fs::read_to_string(file).unwrap();
        let (mut bytes, mut line): (Vec<u8>, Vec<u8>) = Default::default();
        for text in lines.lines() {
            let (offset, digits) = text.split_once(' ').unwrap();
            let offset = usize::from_str_radix(offset, 16).unwrap();
            while bytes.len() < offset {
                bytes.extend(&line);
            }
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            if digits != "end" {
                line = digits.as_bytes().chunks_exact(2).map(byte).collect();
                bytes.extend(&line);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        std::fs::write(&path, bytes).unwrap();
        StateFile::open(&path).unwrap().1
    }

    fn lines(file: &Path) -> String {
        let (bytes, mut last, mut lines) = (std::fs::read(file).unwrap(), None, String::new());
        for (number, line) in bytes.chunks(32).enumerate() {
            if last.replace(line) != Some(line) {
                let digits: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
                lines += &format!("{:06x} {digits}\n", number * 32);
            }
        }
        lines + &format!("{:06x} end\n", bytes.len())
    }

    #[test]
    fn the_file_of_version_1_is_read_and_each_partition_is_split_and_keeps_its_home() {
        let (read, written) = (read("state-1.hex"), golden(v1::PARTITIONS_BEFORE));
        assert_eq!((&read.numbers, &read.table.members), (&written.numbers, &written.table.members));
        assert_eq!(read.table.epoch, written.table.epoch);
        let run = RunKey(0xabcd << 112);
        assert_eq!(read.table.home(run.partition()), Some(written.table.homes[0xabc]));
        assert!(read.table.is_consistent());
        let again = v1::merge(&read.table.homes);
        assert_eq!(again, written.table.homes);
    }

    #[test]
    fn the_file_of_version_2_is_read() {
        // `GOLDEN=FILE cargo test -p larder-coordinator the_file_of_version` writes the file of a new version.
        if let Ok(path) = std::env::var("GOLDEN") {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("state.redb");
            StateFile::open(&file).unwrap().0.write(&golden(PARTITIONS.into())).unwrap();
            std::fs::write(path, lines(&file)).unwrap();
        }
        assert_eq!(read("state-2.hex"), golden(PARTITIONS.into()));
    }

    #[test]
    fn the_file_is_its_users_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        StateFile::open(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_file_is_an_error_or_a_state_and_never_a_panic() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        StateFile::open(&path).unwrap().0.write(&golden(PARTITIONS.into())).unwrap();
        let good = std::fs::read(&path).unwrap();
        let places: Vec<_> = (0..good.len()).filter(|&at| good[at] != 0).collect();
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..40 {
            let mut bytes = good.clone();
            for _ in 0..rng.usize(1..20) {
                bytes[places[rng.usize(..places.len())]] ^= 1 << rng.u8(..8);
            }
            std::fs::write(&path, bytes).unwrap();
            drop(StateFile::open(&path));
        }
    }

    #[test]
    fn a_new_file_is_whole_when_it_has_its_name_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        make(&path).unwrap();
        make(&path).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(open(&path).unwrap().state, None);
    }

    #[test]
    fn two_coordinators_do_not_share_a_state_and_another_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let first = StateFile::open(&path).unwrap();
        let error = StateFile::open(&path).unwrap_err();
        assert!(error.to_string().contains("another coordinator"), "{error}");
        drop(first);
        let other = dir.path().join("other");
        std::fs::write(&other, "anything but a state ".repeat(1_000)).unwrap();
        let error = StateFile::open(&other).unwrap_err();
        assert!(error.to_string().contains("is it this program's file"), "{error}");
    }
}
