//! Every bound of the protocols, in one place.

/// The latest version of the session protocol that this release speaks; a session has the lower version of its two sides. In
/// sessions of the version before, anchors name shorter runs ([`crate::chain::Chain::for_session`]), and there are no names of
/// requests, no descriptions of chunks and no sessions of operators.
pub const SESSION_VERSION: u16 = 6;

/// The first version of the session protocol in which an engine may name its requests.
pub const NAMES_SINCE_SESSION_VERSION: u16 = 6;

/// The first version of the session protocol in which an engine may describe chunks.
pub const DESCRIPTIONS_SINCE_SESSION_VERSION: u16 = 6;

/// The first version of the session protocol in which a session may say that it asks for an operator.
pub const OBSERVERS_SINCE_SESSION_VERSION: u16 = 6;

/// The earliest version of the session protocol that this release speaks.
pub const EARLIEST_SESSION_VERSION: u16 = 5;

/// Bytes of one frame's payload.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// Descriptors that come with one frame (the kernel's own limit is 253).
pub const MAX_FRAME_DESCRIPTORS: usize = 128;

/// Chunks in one chain: at 32 bytes a hash they fill a quarter of a frame. With 256-token chunks, two million tokens.
pub const MAX_CHAIN_CHUNKS: usize = 8_192;

/// Blocks that one lease or one commit may name.
pub const MAX_MESSAGE_BLOCKS: usize = 16_384;

/// The largest chunk index. A larger index can only be an error: 2^24 chunks of one token are 16 million tokens.
pub const MAX_CHUNK_INDEX: u32 = 1 << 24;

/// Tokens in one chunk.
pub const MAX_CHUNK_TOKENS: u32 = 65_536;

/// Pools of a namespace.
pub const MAX_POOLS: usize = 8;

/// Slices (TP x PP ranks) of a namespace.
pub const MAX_SLICES: u16 = 1_024;

/// Layers of a pool.
pub const MAX_LAYERS: u32 = 4_096;

/// Bytes of one block.
pub const MAX_BLOCK_BYTES: u64 = 1 << 32;

/// Bytes of one name in a namespace (model, revision, layout, pool, tenant).
pub const MAX_NAME_BYTES: usize = 256;

/// Bytes of the extra keys of one described chunk.
pub const MAX_EXTRA_KEYS_BYTES: usize = 16 << 10;

/// Namespaces that one session registers.
pub const MAX_SESSION_NAMESPACES: usize = 16;

/// Prefetches of one session that were not collected yet, with its leases under way.
pub const MAX_SESSION_GATHERS: usize = 1_024;

/// Follows that one session has open.
pub const MAX_SESSION_FOLLOWS: usize = 1_024;

/// Requests that one session has outstanding. At this limit a client waits; beyond it a node closes the session.
pub const MAX_OUTSTANDING_REQUESTS: usize = 64;

/// Bytes of one message between nodes, or with the coordinator.
pub const MAX_PEER_MESSAGE_BYTES: usize = 1 << 20;

/// Chunks that one question to the directory names: a quarter of a message.
pub const MAX_FIND_ROWS: usize = MAX_CHAIN_CHUNKS;

/// Changes in the announcements of one message: a quarter of the message.
pub const MAX_ANNOUNCE_CHANGES: usize = 8_192;

/// Announcements in one message, each of another actor of its node.
pub const MAX_ANNOUNCES: usize = 256;

/// Chunks that one fetch names.
pub const MAX_FETCH_CHUNKS: usize = 256;

/// Nodes of one cluster.
pub const MAX_MEMBERS: usize = 16_384;

/// Tensors that one session registers.
pub const MAX_SESSION_TENSORS: usize = 64;

/// Regions of memory of one session's tensors. An engine with separate keys and values needs two for each layer.
pub const MAX_TENSOR_REGIONS: usize = 1_024;

/// Copies of one session that are under way, or whose end the session has not asked for.
pub const MAX_SESSION_COPIES: usize = 16;

/// Pages of one copy.
pub const MAX_COPY_PAGES: usize = 65_536;

/// The largest incarnation of a node that a coordinator believes: read as microseconds since 1970, it lies 146,000 years ahead.
pub const MAX_INCARNATION: u64 = 1 << 62;

/// The largest term that a coordinator accepts from a node: no number of starts comes near it.
pub const MAX_TERM: u64 = 1 << 62;
