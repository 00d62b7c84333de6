//! Namespaces and chains of chunks, as Python sees them.

use larder_protocol::describe::Described;
use larder_protocol::hashing::PromptExtra;
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::{ChunkHash, HitPolicy, NamespaceSpec, PoolSpec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A namespace that a session has registered. Only that session can use it.
///
/// A chunk has one block for each slice of the session and each pool: block `slice * pools + pool`, where `slice` counts the
/// slices that were registered.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Namespace {
    pub(crate) inner: larder_client::Namespace,
}

/// Consecutive chunks of one prompt, or independent keys if the namespace is flat.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Chain {
    pub(crate) inner: larder_protocol::Chain,
}

/// `larder_kv.NamespaceSpec`, by its attributes.
#[derive(FromPyObject)]
pub(crate) struct SpecFields {
    model: String,
    revision: String,
    kv_dtype: String,
    layout: String,
    hash_algorithm: String,
    hash_seed: String,
    chunk_tokens: u32,
    engine_block_tokens: u32,
    tensor_parallel: u16,
    pipeline_parallel: u16,
    context_parallel: u16,
    slices: u16,
    pools: Vec<PoolFields>,
    flat: bool,
}

/// `larder_kv.Pool`, by its attributes.
#[derive(FromPyObject)]
struct PoolFields {
    name: String,
    layers: u32,
    layer_bytes: u64,
    hit: HitFields,
}

/// `larder_kv.DescribedChunk`, by its attributes.
#[derive(FromPyObject)]
pub(crate) struct DescribedFields {
    hashes: Vec<Vec<u8>>,
    parent: Option<Vec<u8>>,
    tokens: Vec<u32>,
    lora_id: Option<u32>,
    lora_name: Option<String>,
    extra_keys: String,
}

#[derive(FromPyObject)]
enum HitFields {
    #[pyo3(transparent, annotation = "int")]
    Window(u32),
    #[pyo3(transparent, annotation = "str")]
    Name(String),
}

impl DescribedFields {
    /// The chunk's description for a node.
    ///
    /// # Errors
    /// `ValueError` if a node would refuse it.
    pub(crate) fn resolve(self) -> PyResult<Described> {
        let Self { hashes, parent, tokens, lora_id, lora_name, extra_keys } = self;
        let blocks = hashes.iter().map(|hash| hash_of(hash)).collect::<PyResult<_>>()?;
        let parent = parent.as_deref().map(hash_of).transpose()?;
        let described = Described { blocks, parent, tokens, lora_id, lora_name, extra_keys };
        match described.is_sound() {
            true => Ok(described),
            false => Err(PyValueError::new_err(
                "no description of a chunk: as many tokens for each of its blocks are needed",
            )),
        }
    }
}

impl SpecFields {
    /// The namespace, and the bytes of one block of each pool.
    ///
    /// # Errors
    /// `ValueError` if the namespace is impossible.
    pub(crate) fn resolve(self) -> PyResult<(NamespaceSpec, Vec<u64>)> {
        let hash = match self.hash_algorithm.as_str() {
            "larder" if self.hash_seed.is_empty() => HashAlgorithm::Larder,
            "larder" => return Err(PyValueError::new_err("Larder's own hash has no seed")),
            _ => HashAlgorithm::Engine(EngineHash { name: self.hash_algorithm, seed: self.hash_seed }),
        };
        let pools = self.pools.into_iter().map(PoolFields::resolve).collect::<PyResult<Vec<_>>>()?;
        let block_bytes = pools.iter().map(PoolSpec::block_bytes).collect();
        let spec = NamespaceSpec {
            model: self.model,
            revision: self.revision,
            kv_dtype: self.kv_dtype,
            layout: self.layout,
            hash,
            chunk_tokens: self.chunk_tokens,
            engine_block_tokens: self.engine_block_tokens,
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            context_parallel: self.context_parallel,
            slices: self.slices,
            pools,
            flat: self.flat,
        };
        spec.check().map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok((spec, block_bytes))
    }
}

impl PoolFields {
    fn resolve(self) -> PyResult<PoolSpec> {
        let Self { name, layers, layer_bytes, hit } = self;
        let hit = match hit {
            HitFields::Window(chunks) => HitPolicy::Window(chunks),
            HitFields::Name(name) if name == "all" => HitPolicy::All,
            HitFields::Name(name) if name == "last" => HitPolicy::Last,
            HitFields::Name(name) => {
                let text = format!("`hit` is \"all\", \"last\" or a number of chunks, not {name:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        Ok(PoolSpec { name, layers, layer_bytes, hit })
    }
}

#[pymethods]
impl Namespace {
    /// Tokens of one chunk.
    #[getter]
    fn chunk_tokens(&self) -> u32 {
        self.inner.chunk_tokens()
    }

    /// 64 hexadecimal digits that stand for the namespace, its tenant included.
    #[getter]
    fn fingerprint(&self) -> String {
        ChunkHash(self.inner.fingerprint().0).to_string()
    }

    /// Blocks of one chunk in this session: slices times pools.
    #[getter]
    fn blocks_per_chunk(&self) -> usize {
        self.inner.blocks_per_chunk()
    }

    /// Bytes of block `block` of every chunk.
    #[pyo3(signature = (block = 0))]
    fn block_bytes(&self, block: usize) -> PyResult<u64> {
        check_block(&self.inner, block)?;
        Ok(self.inner.block_bytes(block))
    }

    /// A prompt's chunks from its first one on, named by the engine's own 32-byte hashes (the hash of each chunk's last engine
    /// block), or independent keys if the namespace is flat.
    fn chain(&self, hashes: Vec<Bound<'_, PyBytes>>) -> PyResult<Chain> {
        let hashes = hashes.iter().map(|hash| hash_of(hash.as_bytes()));
        Ok(Chain { inner: self.inner.chain(hashes.collect::<PyResult<_>>()?) })
    }

    /// The full chunks of a prompt under Larder's own hash. `salt` and `lora` also change the KV: `salt` says whose cache it is,
    /// `lora` is the name of the LoRA adapter.
    #[pyo3(signature = (tokens, *, salt = None, lora = None))]
    fn chain_of_tokens(&self, tokens: Vec<u32>, salt: Option<&[u8]>, lora: Option<&[u8]>) -> Chain {
        Chain { inner: self.inner.chain_of_tokens(&tokens, PromptExtra { salt, lora }) }
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.Namespace {}>", self.inner.fingerprint())
    }
}

#[pymethods]
impl Chain {
    /// The chunks' hashes, 32 bytes each, first to last.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.inner.hashes.iter().map(|hash| PyBytes::new(py, &hash.0)).collect()
    }

    /// The chunks at positions `start` to before `end` (to the chain's end if not given), as a chain of their own.
    #[pyo3(signature = (start, end = None))]
    fn part(&self, start: usize, end: Option<usize>) -> PyResult<Self> {
        let end = end.unwrap_or(self.inner.len());
        if start > end || end > self.inner.len() {
            let text = format!("{start} to {end} does not lie within {} chunks", self.inner.len());
            return Err(PyValueError::new_err(text));
        }
        Ok(Self { inner: self.inner.part(start, end) })
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.Chain of {} chunks>", self.inner.len())
    }
}

fn hash_of(bytes: &[u8]) -> PyResult<ChunkHash> {
    let wrong = |_| PyValueError::new_err(format!("a chunk hash has 32 bytes, not {}", bytes.len()));
    bytes.try_into().map(ChunkHash).map_err(wrong)
}

/// # Errors
/// `ValueError` if a chunk of the namespace has no such block.
pub(crate) fn check_block(namespace: &larder_client::Namespace, block: usize) -> PyResult<()> {
    let blocks = namespace.blocks_per_chunk();
    if block < blocks {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("a chunk has {blocks} blocks, there is no block {block}")))
}
