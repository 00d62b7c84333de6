//! Reasons why the device lane refuses a request.

use larder_device::DeviceError;
use larder_protocol::session::{Refusal, RefusalCode, Response};

use crate::arena::MemoryError;

/// Nothing was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceCopyRefused {
    /// There is no device, or it does not do that.
    #[error("{0}; the engine can copy by itself, through the node's host memory")]
    Device(#[from] DeviceError),
    /// No memory for words.
    #[error("no memory for the session's words: {0}")]
    Words(MemoryError),
    /// The pages of a chunk have other bytes than its block.
    #[error(
        "a chunk's pages have {pages_bytes} bytes in {layers} layers, but its block has {block_bytes} in {block_layers}"
    )]
    Block {
        /// Bytes of its pages.
        pages_bytes: u64,
        /// Layers of the tensors.
        layers: u32,
        /// Bytes of its block.
        block_bytes: u64,
        /// Layers of the pool.
        block_layers: u32,
    },
    /// More regions than a session may share.
    #[error("too many regions of tensors: at most {most} a session")]
    TooManyRegions {
        /// How many there may be.
        most: usize,
    },
    /// Not one descriptor for each region that is shared by one.
    #[error("{regions} regions are shared by descriptor, but {found} descriptors came")]
    Descriptors {
        /// How many came.
        found: usize,
        /// How many should have.
        regions: usize,
    },
}

impl From<DeviceCopyRefused> for Response {
    fn from(refused: DeviceCopyRefused) -> Self {
        let code = match &refused {
            DeviceCopyRefused::Device(_) => RefusalCode::Device,
            DeviceCopyRefused::Words(_) => RefusalCode::Internal,
            DeviceCopyRefused::Block { .. } => RefusalCode::Namespace,
            DeviceCopyRefused::TooManyRegions { .. } => RefusalCode::TooLarge,
            DeviceCopyRefused::Descriptors { .. } => RefusalCode::Place,
        };
        Self::Refused(Refusal { code, message: refused.to_string() })
    }
}
