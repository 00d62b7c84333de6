//! Descriptions of the namespaces whose chunks are on disk: a restarted node can use them before any engine comes.
//!
//! One file for each, called by the fingerprint in hexadecimal. A description is right where its own fingerprint is its
//! name: no other checksum is needed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use larder_protocol::namespace::NamespaceSpec;
use rkyv::{Archive, Deserialize, Serialize, rancor};

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
    /// Opens the folder, or makes it, and reads what is described there. What is damaged is left out, with a warning.
    ///
    /// # Errors
    /// Where the folder cannot be made or read.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<KnownNamespace>)> {
        fs::create_dir_all(path)?;
        let mut known = Vec::new();
        for entry in fs::read_dir(path)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.ends_with(TEMPORARY) {
                continue;
            }
            match decode(&fs::read(&path)?).filter(|known| known.name() == name) {
                Some(namespace) => known.push(namespace),
                None => tracing::warn!(path = %path.display(), "the description of a namespace is damaged"),
            }
        }
        Ok((Self { path: path.to_owned() }, known))
    }

    /// Describes a namespace, durably.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn record(&self, namespace: &KnownNamespace) -> io::Result<()> {
        let path = self.path.join(namespace.name());
        let temporary = self.path.join(format!("{}{TEMPORARY}", namespace.name()));
        let bytes = rkyv::to_bytes::<rancor::Error>(namespace).map_err(io::Error::other)?;
        let mut file = File::create(&temporary)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(&self.path)?.sync_all()
    }
}

impl KnownNamespace {
    fn name(&self) -> String {
        self.spec.fingerprint(&self.tenant).to_string()
    }
}

fn decode(bytes: &[u8]) -> Option<KnownNamespace> {
    // Files have no alignment in memory.
    let mut aligned = rkyv::util::AlignedVec::<16>::new();
    aligned.extend_from_slice(bytes);
    rkyv::from_bytes::<KnownNamespace, rancor::Error>(&aligned).ok()
}

/// Ends the names of files that are not whole yet.
const TEMPORARY: &str = ".new";

#[cfg(test)]
mod tests {
    use larder_protocol::namespace::HashAlgorithm;
    use larder_protocol::{HitPolicy, PoolSpec};

    use super::*;

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

    #[test]
    fn what_was_described_is_known_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (open, known) = NamespaceFolder::open(folder.path()).unwrap();
        assert!(known.is_empty());
        open.record(&namespace("a")).unwrap();
        open.record(&namespace("b")).unwrap();
        open.record(&namespace("a")).unwrap();
        let mut known = NamespaceFolder::open(folder.path()).unwrap().1;
        known.sort_by(|a, b| a.tenant.cmp(&b.tenant));
        assert_eq!(known, [namespace("a"), namespace("b")]);
    }

    #[test]
    fn a_damaged_or_unfinished_description_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let (open, _) = NamespaceFolder::open(folder.path()).unwrap();
        open.record(&namespace("a")).unwrap();
        open.record(&namespace("b")).unwrap();
        let path = folder.path().join(namespace("a").name());
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.iter().position(|&byte| byte == b'm').unwrap();
        bytes[at] = b'n';
        fs::write(&path, &bytes).unwrap();
        fs::write(folder.path().join("half.new"), b"x").unwrap();
        assert_eq!(NamespaceFolder::open(folder.path()).unwrap().1, [namespace("b")]);
    }
}
