//! Messages of the device lane: the node copies between an engine's GPU memory and blocks, at the engine's request.
//!
//! The engine says once where its tensors are ([`RegisterTensors`]). From then on its requests carry page numbers: load these
//! leased chunks into these pages ([`LoadPages`]), save these pages as these reserved chunks ([`SavePages`]). Each request begins
//! a copy; the engine asks for the copy's progress and end ([`AskCopy`]). A save is a hand-over, as with
//! [`HandOver`](crate::handoff::HandOver): the node sums the bytes in its own memory, and the chunk's commit names no source.
//!
//! **Words.** A session has one page of 32-bit words that both sides map. A copy can wait for a word that the engine's stream
//! raises when the pages are ready. A copy can raise a word by one for each finished layer; the engine's stream waits for this
//! word. A value counts as reached until the word is 2^31 past it, so numbers may wrap. A failed copy raises its word to the end:
//! streams go on, and the answer says that nothing came.

use rkyv::{Archive, Deserialize, Serialize};

/// Registers an engine's tensors.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct RegisterTensors {
    /// Number of the namespace.
    pub namespace: u32,
    /// Index of the tensors' block among a chunk's blocks in this session, by slice, then pool.
    pub block: u16,
    /// The layout of the pages in the regions.
    pub layout: TensorLayout,
    /// The tensors' memory: the regions that the layout names, in order.
    pub memory: Vec<TensorMemory>,
}

/// The layout of the pages of all layers. All distances are in bytes and multiples of 16.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// The planes of each layer, layer by layer: keys, values, or both together.
    pub planes: Vec<TensorPlane>,
    /// Planes that belong to one layer.
    pub planes_per_layer: u32,
    /// Pages of each plane.
    pub pages: u32,
    /// Pages of a chunk.
    pub pages_per_chunk: u32,
    /// The number of runs in a page and their distances, dimension by dimension, outermost first.
    pub dims: Vec<TensorDim>,
    /// Bytes of one run, which is contiguous.
    pub run_bytes: u64,
}

/// The place of one plane's pages.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPlane {
    /// Number of the region in which the plane lies.
    pub region: u32,
    /// Offset of page 0 in the region.
    pub offset: u64,
    /// Bytes from one page to the next.
    pub page_stride: u64,
}

/// A dimension of a page.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDim {
    /// Number of steps.
    pub count: u32,
    /// Bytes from one step to the next.
    pub stride: u64,
}

/// One region of an engine's GPU memory.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMemory {
    /// Memory of `cudaMalloc`, by its IPC handle.
    Ipc(IpcMemory),
    /// Memory of the virtual memory interface: this many bytes, the whole allocation. Its descriptor comes with the message, in
    /// the order of the regions.
    Descriptor(u64),
}

/// A part of an allocation of `cudaMalloc`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcMemory {
    /// The handle of `cudaIpcGetMemHandle`.
    pub handle: [u8; 64],
    /// Offset of the region in the allocation.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
}

/// The tensors are registered. One descriptor comes with the message: the session's page of words, always the same.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorsRegistered {
    /// The tensors' number in this session.
    pub tensors: u32,
    /// Bytes of the page of words.
    pub word_bytes: u64,
}

/// A word of the session's page.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// The word's number: its offset in the page is four times this.
    pub word: u32,
    /// The value that the word must reach, or the value from which the copy raises the word.
    pub value: u32,
}

/// The words by which a copy and the engine's streams wait for each other.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyWords {
    /// The copy begins when this word has its value.
    pub after: Option<Word>,
    /// The copy raises this word by one for each finished layer.
    pub then: Option<Word>,
}

/// Loads leased chunks into pages.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LoadPages {
    /// The lease. It may be released while the copy is under way.
    pub lease: u64,
    /// The tensors.
    pub tensors: u32,
    /// The pages to fill, for consecutive pages of the prompt.
    pub pages: Vec<u32>,
    /// The position of the first of these pages in the prompt, counted from the lease's first chunk.
    pub first_page: u64,
    /// The first layer.
    pub from_layer: u32,
    /// The layer behind the last layer.
    pub to_layer: u32,
    /// Whether the copy reports layers one by one.
    pub by_layer: bool,
    /// The words that the copy waits for and raises.
    pub words: CopyWords,
}

/// Saves pages as reserved chunks.
///
/// While the copy runs, the node takes no other copy of these chunks. If the copy fails, the chunks are given up.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SavePages {
    /// The reservation, of a session with one slice.
    pub reservation: u64,
    /// Positions (in the reserved chain) of the chunks.
    pub chunks: Vec<u32>,
    /// The tensors.
    pub tensors: u32,
    /// The pages of each chunk, chunk by chunk.
    pub pages: Vec<u32>,
    /// The first layer.
    pub from_layer: u32,
    /// The layer behind the last layer.
    pub to_layer: u32,
    /// The words that the copy waits for and raises.
    pub words: CopyWords,
}

/// Asks for the progress of a copy.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskCopy {
    /// The copy.
    pub copy: u64,
    /// Requested layers: the answer comes when this many are done, the copy has ended, or `wait_ms` have passed.
    pub layers: u32,
    /// How long the answer may wait.
    pub wait_ms: u64,
}

/// The progress of a copy.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// Finished layers, from the copy's first on.
    pub layers: u32,
    /// How the copy ended, once it has ended. The node says this once; afterwards the copy's number means nothing.
    pub end: Option<CopyEnd>,
}

/// How a copy ended.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum CopyEnd {
    /// All bytes are in place; saved blocks are summed and can be committed.
    Done,
    /// The copy was refused, or given up before it began: nothing was moved.
    Refused,
    /// The copy failed: the pages' contents are unknown, and the chunks to save are given up.
    Failed,
    /// The device did not finish in time. The copy counts as failed. A copy that had begun goes on, also after the session's end:
    /// the pages of a load may change at any time, so use them for nothing else.
    Stalled,
    /// The device was lost. The copy counts as failed; the engine must register its tensors again.
    Lost,
}

impl CopyEnd {
    /// The name of the end in metrics, traces and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}
