//! Descriptions of the namespaces whose chunks are on disk: a restarted node can use them before any engine comes.
//!
//! Each description is one file beside the tier. The file's name is the first bytes of the fingerprint in hexadecimal. A
//! description is right if its own fingerprint matches this name, so it needs no other checksum. The description of a namespace
//! without records is deleted.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use larder_protocol::Fingerprint;
use larder_protocol::namespace::NamespaceSpec;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize, rancor};

use super::damage::FoundDamage;
use crate::private;

/// A namespace and the tenant that it belongs to.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct KnownNamespace {
    /// The tenant's name.
    pub tenant: String,
    /// The namespace.
    pub spec: NamespaceSpec,
}

/// The folder of the descriptions.
#[derive(Debug)]
pub struct NamespaceFolder {
    path: PathBuf,
}

impl NamespaceFolder {
    /// Opens the folder, or makes it, and reads the descriptions of the namespaces that the tier `holds`, in that order. Deletes
    /// the others. Leaves out damaged and unreadable descriptions, with a warning, and notes the damage.
    ///
    /// # Errors
    /// Fails if the folder cannot be made or read.
    pub(crate) fn open(
        path: &Path,
        holds: &[Fingerprint],
        damage: &FoundDamage,
    ) -> io::Result<(Self, Vec<KnownNamespace>)> {
        private::make_folder(path)?;
        let folder = Self { path: path.to_owned() };
        let names: HashMap<String, usize> =
            (0..).zip(holds).map(|(order, held)| (held.to_string(), order)).collect();
        let mut known = Vec::new();
        for entry in fs::read_dir(path)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match names.get(name) {
                Some(&order) => match folder.read(name) {
                    Ok(namespace) => known.push((order, namespace)),
                    Err(error) => {
                        if error.kind() == io::ErrorKind::InvalidData {
                            damage.wrong_bytes();
                        } else {
                            damage.unreadable();
                        }
                        tracing::warn!(%error, path = %path.display(), "the description of a namespace cannot be used");
                    }
                },
                None if is_ours(name) => {
                    if let Err(error) = fs::remove_file(&path) {
                        tracing::warn!(%error, path = %path.display(), "the unused description of a namespace cannot be removed");
                    }
                }
                None => {}
            }
        }
        known.sort_by_key(|&(order, _)| order);
        Ok((folder, known.into_iter().map(|(_, namespace)| namespace).collect()))
    }

    /// Writes a namespace's description, durably.
    ///
    /// # Errors
    /// Fails if the description cannot be written.
    pub fn record(&self, namespace: &KnownNamespace) -> io::Result<()> {
        // Somebody may have removed the folder.
        private::make_folder(&self.path)?;
        let path = self.path.join(namespace.name());
        let temporary = self.path.join(format!("{}{TEMPORARY}", namespace.name()));
        let bytes = rkyv::to_bytes::<rancor::Error>(namespace).map_err(io::Error::other)?;
        let mut file = private::options().write(true).create(true).truncate(true).open(&temporary)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(&self.path)?.sync_all()
    }

    /// Deletes a namespace's description, if there is one, once none of its chunks is on disk any more.
    ///
    /// # Errors
    /// Fails if the description cannot be deleted.
    pub fn forget(&self, fingerprint: &Fingerprint) -> io::Result<()> {
        match fs::remove_file(self.path.join(fingerprint.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn read(&self, name: &str) -> io::Result<KnownNamespace> {
        let path = self.path.join(name);
        // Reading something else than a file could wait for ever.
        if !path.metadata()?.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        // The bytes of a file need an aligned copy.
        let mut bytes = AlignedVec::<16>::new();
        bytes.extend_from_reader(&mut File::open(path)?)?;
        let known = rkyv::from_bytes::<KnownNamespace, rancor::Error>(&bytes).ok();
        known
            .filter(|known| known.name() == name)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it is damaged"))
    }
}

impl KnownNamespace {
    /// The namespace's fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        self.spec.fingerprint(&self.tenant)
    }

    fn name(&self) -> String {
        self.fingerprint().to_string()
    }
}

/// Whether a file of this name is a description, complete or not.
fn is_ours(name: &str) -> bool {
    let fingerprint = name.strip_suffix(TEMPORARY).unwrap_or(name);
    fingerprint.len() == 16 && fingerprint.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Suffix of the names of files that are not complete yet.
const TEMPORARY: &str = ".new";

#[cfg(test)]
mod tests {
    use larder_protocol::namespace::HashAlgorithm;
    use larder_protocol::{HitPolicy, PoolSpec};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;
    use crate::clock::Clock;

    fn namespace(tenant: &str) -> KnownNamespace {
        let spec = NamespaceSpec {
            model: "m".into(),
            revision: String::new(),
            kv_dtype: "bfloat16".into(),
            layout: "nhd".into(),
            hash: HashAlgorithm::Larder,
            chunk_tokens: 16,
            engine_block_tokens: 16,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            context_parallel: 1,
            slices: 1,
            pools: vec![PoolSpec { name: "kv".into(), layers: 2, layer_bytes: 8, hit: HitPolicy::All }],
            flat: false,
        };
        KnownNamespace { tenant: tenant.into(), spec }
    }

    fn described(path: &Path, tenants: &[&str]) -> (NamespaceFolder, Vec<KnownNamespace>) {
        let holds: Vec<Fingerprint> = tenants.iter().map(|tenant| namespace(tenant).fingerprint()).collect();
        NamespaceFolder::open(path, &holds, &no_damage()).unwrap()
    }

    fn no_damage() -> FoundDamage {
        FoundDamage::new(Clock::start())
    }

    #[test]
    fn what_was_described_is_known_after_a_restart_in_the_order_that_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let (open, known) = described(folder.path(), &["a", "b"]);
        assert!(known.is_empty());
        for tenant in ["a", "b", "c", "a"] {
            open.record(&namespace(tenant)).unwrap();
        }
        assert_eq!(described(folder.path(), &["c", "a", "b"]).1, ["c", "a", "b"].map(namespace));
    }

    #[test]
    fn a_namespace_without_chunks_is_no_longer_described() {
        let folder = tempfile::tempdir().unwrap();
        let (open, _) = described(folder.path(), &[]);
        for tenant in ["a", "b", "c"] {
            open.record(&namespace(tenant)).unwrap();
        }
        open.forget(&namespace("a").fingerprint()).unwrap();
        open.forget(&namespace("a").fingerprint()).unwrap();
        fs::write(folder.path().join("of_somebody"), b"x").unwrap();
        assert_eq!(described(folder.path(), &["b"]).1, [namespace("b")]);
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "its own, and what is none of ours");
        assert_eq!(described(folder.path(), &["c"]).1, []);
    }

    #[test]
    fn a_damaged_or_unfinished_description_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let (open, _) = described(folder.path(), &[]);
        open.record(&namespace("a")).unwrap();
        open.record(&namespace("b")).unwrap();
        let path = folder.path().join(namespace("a").name());
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.iter().position(|&byte| byte == b'm').unwrap();
        bytes[at] = b'n';
        fs::write(&path, &bytes).unwrap();
        let half = folder.path().join(format!("{}.new", namespace("c").name()));
        fs::write(&half, b"x").unwrap();
        let (holds, damage) = (["a", "b", "c"].map(|tenant| namespace(tenant).fingerprint()), no_damage());
        let (_, known) = NamespaceFolder::open(folder.path(), &holds, &damage).unwrap();
        assert_eq!(known, [namespace("b")]);
        let told = damage.trouble().unwrap();
        assert!(
            told.contains("1 records or descriptions of namespaces had wrong bytes and 0 could"),
            "{told}"
        );
        assert!(!half.exists());
    }

    #[test]
    fn a_pipe_in_the_place_of_a_description_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        described(folder.path(), &[]).0.record(&namespace("b")).unwrap();
        let pipe = folder.path().join(namespace("a").name());
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(described(folder.path(), &["a", "b"]).1, [namespace("b")]);
    }

    #[test]
    fn a_folder_that_was_removed_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("namespaces");
        let (open, _) = described(&path, &[]);
        fs::remove_dir_all(&path).unwrap();
        open.record(&namespace("a")).unwrap();
        assert_eq!(described(&path, &["a"]).1, [namespace("a")]);
    }
}
