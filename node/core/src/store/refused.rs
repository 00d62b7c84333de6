//! Reasons why the store did nothing, as answers to engines.

use larder_protocol::ChainError;
use larder_protocol::limits::{
    MAX_FRAME_DESCRIPTORS, MAX_MESSAGE_BLOCKS, MAX_NAME_BYTES, MAX_SESSION_NAMESPACES,
};
use larder_protocol::namespace::NamespaceError;
use larder_protocol::session::{Busy, Refusal, RefusalCode, Response, Scarce};

/// Why the store did nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No room now; asking again later may help.
    #[error("busy: ask again in {retry_after_ms} ms")]
    Busy {
        /// The exhausted resource.
        what: Scarce,
        /// The time after which asking again may help.
        retry_after_ms: u64,
    },
    /// The chain is invalid, or contradicts cached chunks.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The namespace's description is invalid.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The engine's block size differs from its namespace's.
    #[error("pool `{pool}`: the engine's blocks have {engine_bytes} bytes, but {layers} layers of {layer_bytes} bytes make {}: check layers, heads, dtype and chunk size", u64::from(*.layers) * .layer_bytes)]
    BlockSize {
        /// The pool.
        pool: String,
        /// Bytes of the engine's blocks.
        engine_bytes: u64,
        /// Layers of the namespace's pool.
        layers: u32,
        /// Bytes of one of these layers.
        layer_bytes: u64,
    },
    /// The number of block sizes differs from the number of pools.
    #[error("the session gives {found} block sizes for {pools} pools: give one for each pool")]
    BlockSizes {
        /// Sizes found.
        found: usize,
        /// Pools of the namespace.
        pools: usize,
    },
    /// Slices that the namespace does not have, duplicate slices, or none.
    #[error("slices {slices:?}: name each of the session's slices once, out of {of}")]
    Slices {
        /// Slices found.
        slices: Vec<u16>,
        /// Slices of the namespace.
        of: u16,
    },
    /// A second registration of a namespace in a session, with other slices.
    #[error(
        "this session registered the namespace with slices {registered:?}, not {slices:?}: name all slices at once, or open a session for each"
    )]
    OtherSlices {
        /// The slices of the first registration.
        registered: Vec<u16>,
        /// Slices found.
        slices: Vec<u16>,
    },
    /// More namespaces than a session may have.
    #[error("the session has {MAX_SESSION_NAMESPACES} namespaces, the most: open another session for more")]
    TooManySessionNamespaces,
    /// More namespaces than a tenant may have.
    #[error(
        "the tenant has {most} namespaces in use, the most: end sessions whose models are no longer served, or purge a model's chunks (`larder purge --namespace-id`)"
    )]
    TooManyNamespaces {
        /// The limit.
        most: usize,
    },
    /// A block that no slot can ever hold.
    #[error(
        "a block of {block_bytes} bytes does not fit into an extent of {extent_bytes}: set host.extent_bytes to the block's size at least"
    )]
    BlockTooLarge {
        /// Bytes of the block.
        block_bytes: u64,
        /// Bytes of an extent.
        extent_bytes: u64,
    },
    /// A chunk that the tenant's memory can never hold.
    #[error(
        "a chunk takes {bytes} bytes, in whole extents, and this tenant may have {most}: raise host.arena_bytes or the tenant's max_bytes, or set a smaller host.extent_bytes"
    )]
    ChunkTooLarge {
        /// Bytes of the extents that one chunk takes.
        bytes: u64,
        /// Bytes of the extents that the tenant may hold.
        most: u64,
    },
    /// A block that the session's write window can never hold.
    #[error(
        "a block of {block_bytes} bytes does not fit into the write window of {window_bytes}: ask for a larger window, and set session.max_window_bytes to its size at least"
    )]
    WindowTooSmall {
        /// Bytes of the block.
        block_bytes: u64,
        /// Bytes of the window.
        window_bytes: u64,
    },
    /// A reservation that can never be met.
    #[error(
        "{blocks} blocks of {bytes} bytes together; a session of this tenant may reserve {MAX_MESSAGE_BLOCKS} blocks and {most} bytes, in at most {MAX_FRAME_DESCRIPTORS} extents that are new to it: reserve in smaller parts"
    )]
    TooLarge {
        /// Blocks asked.
        blocks: usize,
        /// Bytes asked.
        bytes: u64,
        /// Bytes allowed.
        most: u64,
    },
    /// A follow that is of use only as a whole, of more blocks than a session may lease.
    #[error(
        "a follow of {blocks} blocks; a session may follow {most} at once: open one session a slice, or use larger chunks"
    )]
    FollowTooLarge {
        /// Blocks asked.
        blocks: usize,
        /// Blocks allowed.
        most: usize,
    },
    /// A follow whose writer's node has a longer name than nodes have.
    #[error(
        "the name of the writer's node has {bytes} bytes, but names of nodes have at most {MAX_NAME_BYTES}"
    )]
    WriterName {
        /// Bytes of the name.
        bytes: usize,
    },
    /// A number that names no pin of this tenant.
    #[error("this tenant has no pin {0} on this device, or no longer: `larder list pins` shows the pins")]
    UnknownPin(u64),
    /// A number that names nothing of this session.
    #[error("{what} {number} does not belong to this session, or has ended")]
    Unknown {
        /// The kind of thing that the number should name.
        what: &'static str,
        /// The number.
        number: u64,
    },
    /// A position that is not reserved, or is committed already.
    #[error(
        "chunk {position} of reservation {reservation} is not open for commit: not reserved, or committed already"
    )]
    NotOpen {
        /// The reservation.
        reservation: u64,
        /// The position.
        position: u32,
    },
    /// Layers that a chunk's pool does not have, or that are in place already.
    #[error(
        "layers {from_layer} to {to_layer} of pool {pool} of the chunk at {position} cannot be handed over: the pool does not have them, or they are in place already"
    )]
    Layers {
        /// The position of the chunk.
        position: u32,
        /// The pool.
        pool: u8,
        /// The first layer.
        from_layer: u32,
        /// The layer behind the last one.
        to_layer: u32,
    },
    /// A chunk with some layers handed over, but not all.
    #[error(
        "layers of chunk {position} of reservation {reservation} are missing: hand them over before the commit"
    )]
    LayersMissing {
        /// The reservation.
        reservation: u64,
        /// The position.
        position: u32,
    },
    /// Chunks that the lease does not cover, or a block of them that the lease does not have.
    #[error("the lease does not cover all chunks {from} to {to} in the tensors' slice and pool")]
    NotLeased {
        /// The position of the first chunk.
        from: u64,
        /// The position behind the last chunk.
        to: u64,
    },
    /// A save of a session with several slices.
    #[error(
        "a session of {slices} slices saves through its write window: open one session a slice to save from GPU memory"
    )]
    SeveralSlices {
        /// The slices.
        slices: usize,
    },
    /// A block outside the session's write window.
    #[error("{bytes} bytes at offset {source_offset} lie outside the write window of {window_bytes} bytes")]
    OutsideWindow {
        /// Offset of the block.
        source_offset: u64,
        /// Its size.
        bytes: u64,
        /// The window's size.
        window_bytes: u64,
    },
    /// More tensors than a session may have.
    #[error("too many tensors: at most {most} a session")]
    TooManyTensors {
        /// The limit.
        most: usize,
    },
    /// A number that names no tensors of the session, or tensors that were lost with the GPU.
    #[error("there are no tensors {number} in this session, or the GPU was lost: register them again")]
    NoTensors {
        /// The number.
        number: u32,
    },
    /// A number that names no copy of the session, or a copy whose end was reported already.
    #[error("there is no copy {number} in this session, or its end was reported already")]
    NoCopy {
        /// The number.
        number: u64,
    },
    /// Pages, layers or words that do not exist.
    #[error("a copy names {what} {found}, but there are {of}")]
    Beyond {
        /// The kind: page, layer or word.
        what: &'static str,
        /// The requested number.
        found: u64,
        /// The existing count.
        of: u64,
    },
    /// The node itself failed; its log says more.
    #[error("the node failed: see its log")]
    Internal,
    /// A message that is not allowed at this point of a session.
    #[error("this message is not allowed here: a session starts with one hello")]
    OutOfOrder,
    /// The number of sets of pools differs from the number of chunks, or a set has a pool that the namespace does not have.
    #[error(
        "{found} sets of pools for {chunks} chunks of a namespace with {of} pools: name one for each chunk, or none at all"
    )]
    Pools {
        /// Sets found.
        found: usize,
        /// Chunks of the chain.
        chunks: usize,
        /// Pools of the namespace.
        of: usize,
    },
    /// The number of sources differs from the number of blocks.
    #[error("the commit names {found} block sources for {blocks} blocks: name one for each block")]
    Sources {
        /// Sources found.
        found: usize,
        /// Blocks to commit.
        blocks: usize,
    },
}

impl From<Refused> for Response {
    fn from(refused: Refused) -> Self {
        if let Refused::Busy { what, retry_after_ms } = refused {
            return Self::Busy(Busy { what, retry_after_ms });
        }
        let code = match &refused {
            Refused::Chain(_) => RefusalCode::Chain,
            Refused::Namespace(_)
            | Refused::BlockSize { .. }
            | Refused::BlockSizes { .. }
            | Refused::Slices { .. }
            | Refused::OtherSlices { .. }
            | Refused::Pools { .. }
            | Refused::TooManySessionNamespaces
            | Refused::TooManyNamespaces { .. } => RefusalCode::Namespace,
            Refused::BlockTooLarge { .. }
            | Refused::ChunkTooLarge { .. }
            | Refused::WindowTooSmall { .. }
            | Refused::TooLarge { .. }
            | Refused::FollowTooLarge { .. }
            | Refused::WriterName { .. }
            | Refused::TooManyTensors { .. } => RefusalCode::TooLarge,
            Refused::Unknown { .. }
            | Refused::UnknownPin(_)
            | Refused::NoTensors { .. }
            | Refused::NoCopy { .. } => RefusalCode::Unknown,
            Refused::OutsideWindow { .. }
            | Refused::Sources { .. }
            | Refused::NotLeased { .. }
            | Refused::SeveralSlices { .. }
            | Refused::NotOpen { .. }
            | Refused::Layers { .. }
            | Refused::Beyond { .. }
            | Refused::LayersMissing { .. } => RefusalCode::Place,
            Refused::OutOfOrder => RefusalCode::Protocol,
            Refused::Internal | Refused::Busy { .. } => RefusalCode::Internal,
        };
        Self::Refused(Refusal { code, message: refused.to_string() })
    }
}
