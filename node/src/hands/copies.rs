//! Copies and sums by the copy pool.

use std::sync::Arc;

use futures_util::FutureExt as _;
use larder_core::CopyAnswer;
use larder_core::store::BlockMove;

use super::Hands;
use crate::copy::{CopyOrder, Move};
use crate::window::Window;

impl Hands {
    /// Copies and sums blocks; `window` is the session's. Few bytes are copied on the spot.
    pub(crate) fn copy(
        &self,
        window: Option<Arc<Window>>,
        moves: &[BlockMove],
    ) -> Result<impl Future<Output = CopyAnswer> + use<>, CopyAnswer> {
        let copied = moves.iter().map(|block| Move {
            source: block.source.unwrap_or_default(),
            is_in_place: block.is_in_place,
            to: self.arena.destination(block),
        });
        let order = CopyOrder::new(window, copied.collect()).map_err(|error| {
            tracing::error!(%error, "the store made an order that does not fit its memory; please report this line");
            CopyAnswer::Impossible
        })?;
        if order.is_small() {
            return Err(CopyAnswer::Done(order.perform()));
        }
        let copied = self.copy_pool.submit(order).ok_or(CopyAnswer::Busy)?;
        Ok(copied.map(|copied| {
            let failed = |_| {
                tracing::error!("the copy pool failed: the blocks are dropped");
                CopyAnswer::Failed
            };
            copied.map_or_else(failed, CopyAnswer::Done)
        }))
    }
}
