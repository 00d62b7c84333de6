//! The views of `larder top`: samples of nodes, their changes between two times, and the rendering.

pub(crate) mod render;
pub(crate) mod sample;
pub(crate) mod terminal;
pub(crate) mod view;
