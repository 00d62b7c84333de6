//! The coordinator's state on disk, in one embedded store.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use larder_protocol::table::{PARTITIONS, Table};
use redb::{Database, ReadableDatabase as _, TableDefinition};
use rkyv::rancor;

use crate::membership::State;

/// The store.
#[derive(Debug)]
pub struct StateFile {
    database: Database,
    path: PathBuf,
}

/// Why the state is not kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The file cannot be opened.
    #[error(
        "cannot open the state {}: does another coordinator use it, and is it this program's file? If you move the file away, the coordinator makes a new one, and the nodes tell it their epoch",
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// The store's error.
        source: Box<redb::Error>,
    },
    /// The file has something else in it.
    #[error("the state {} is damaged: move it away; the coordinator makes a new one, and the nodes tell it their epoch", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be written.
    #[error("cannot write the state {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The store's error.
        source: Box<redb::Error>,
    },
}

impl StateFile {
    /// Opens the file, or makes it, and reads the state.
    ///
    /// # Errors
    /// [`StateError`]
    pub fn open(path: &Path) -> Result<(Self, State), StateError> {
        let open = || -> Result<(Database, Option<Vec<u8>>), redb::Error> {
            // Others have no business with it.
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)?;
            let database = Database::builder().create_file(file)?;
            let write = database.begin_write()?;
            write.open_table(TABLE)?;
            write.commit()?;
            let read = database.begin_read()?;
            let bytes = read.open_table(TABLE)?.get(KEY)?.map(|value| value.value().to_vec());
            Ok((database, bytes))
        };
        let (database, bytes) =
            open().map_err(|source| StateError::Open { path: path.to_owned(), source: Box::new(source) })?;
        let damaged = || StateError::Damaged { path: path.to_owned() };
        let mut state = match bytes {
            None => State::default(),
            Some(bytes) => {
                let mut aligned = rkyv::util::AlignedVec::<16>::with_capacity(bytes.len());
                aligned.extend_from_slice(&bytes);
                rkyv::from_bytes::<State, rancor::Error>(&aligned).map_err(|_| damaged())?
            }
        };
        split_partitions(&mut state.table);
        if !state.table.is_consistent() {
            return Err(damaged());
        }
        Ok((Self { database, path: path.to_owned() }, state))
    }

    /// Writes the state; it is on disk when this returns.
    ///
    /// # Errors
    /// [`StateError::Write`]
    pub fn write(&self, state: &State) -> Result<(), StateError> {
        let bytes = rkyv::to_bytes::<rancor::Error>(state)
            .map_err(|_| StateError::Damaged { path: self.path.clone() })?;
        let write = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            write.open_table(TABLE)?.insert(KEY, bytes.as_slice())?;
            write.commit()?;
            Ok(())
        };
        write().map_err(|source| StateError::Write { path: self.path.clone(), source: Box::new(source) })
    }
}

/// Splits the partitions of a table that an earlier version wrote: the names of a partition's parts begin with its own, and they
/// keep its home.
fn split_partitions(table: &mut Table) {
    let parts = usize::from(PARTITIONS).checked_div(table.homes.len()).unwrap_or(1);
    if parts > 1 {
        let split = table.homes.iter().flat_map(|&home| std::iter::repeat_n(home, parts));
        table.homes = split.collect();
    }
}

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("larder coordinator 1");
const KEY: &str = "state";

#[cfg(test)]
mod tests {
    use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, RunKey, Table};

    use super::*;

    #[test]
    fn what_was_written_is_read_by_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let (file, empty) = StateFile::open(&path).unwrap();
        assert_eq!(empty, State::default());
        let table = Table { epoch: Epoch { term: 3, number: 9 }, ..Table::default() };
        let state = State { table, numbers: vec![("a".into(), NodeNumber(4))] };
        file.write(&state).unwrap();
        drop(file);
        assert_eq!(StateFile::open(&path).unwrap().1, state);
    }

    #[test]
    fn the_partitions_of_an_earlier_version_are_split_and_keep_their_homes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let address = ([127, 0, 0, 1], 1).into();
        let member = |number| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1,
            peer: address,
            http: address,
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        let homes: Vec<_> = (0..4_096).map(|partition| NodeNumber(partition % 3 + 1)).collect();
        let table =
            Table { epoch: Epoch { term: 3, number: 9 }, members: (1..=3).map(member).collect(), homes };
        let state = State { table, numbers: Vec::new() };
        let file = StateFile::open(&path).unwrap().0;
        file.write(&state).unwrap();
        drop(file);
        let read = StateFile::open(&path).unwrap().1.table;
        let run = RunKey(0xabcd << 112);
        assert_eq!(read.home(run.partition()), Some(state.table.homes[0xabc]));
        assert!(read.is_consistent());
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
    fn two_coordinators_do_not_share_a_state_and_another_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let first = StateFile::open(&path).unwrap();
        let error = StateFile::open(&path).unwrap_err();
        assert!(error.to_string().contains("another coordinator"), "{error}");
        drop(first);
        let other = dir.path().join("other");
        std::fs::write(&other, "anything but a state ".repeat(1_000)).unwrap();
        assert!(matches!(StateFile::open(&other), Err(StateError::Open { .. })));
    }
}
