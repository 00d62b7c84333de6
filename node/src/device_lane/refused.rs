//! Reasons why the device lane refuses a request.

use larder_device::DeviceError;
use larder_protocol::session::{Refusal, RefusalCode, Response};

use crate::arena::MemoryError;

/// Why the device lane refuses a request. Nothing was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceCopyRefused {
    /// There is no device, or the device cannot do this.
    #[error("{0}; the engine can copy by itself, through the node's host memory")]
    Device(#[from] DeviceError),
    /// There is no memory for the session's words.
    #[error("no memory for the words that show the progress of copies: {0}")]
    Words(MemoryError),
    /// The pages of a chunk have another size or other layers than its block.
    #[error(
        "a chunk's pages have {pages_bytes} bytes in {layers} layers, but its block has {block_bytes} in {block_layers}"
    )]
    Block {
        /// Bytes of the chunk's pages.
        pages_bytes: u64,
        /// Layers of the tensors.
        layers: u32,
        /// Bytes of the chunk's block.
        block_bytes: u64,
        /// Layers of the pool.
        block_layers: u32,
    },
    /// The session shares too many regions.
    #[error("too many regions of tensors: at most {most} a session")]
    TooManyRegions {
        /// Limit of regions for one session.
        most: usize,
    },
    /// The number of descriptors differs from the number of regions shared by descriptor.
    #[error("{regions} regions are shared by descriptor, but {found} descriptors came")]
    Descriptors {
        /// Descriptors that came.
        found: usize,
        /// Regions shared by descriptor.
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
