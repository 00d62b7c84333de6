//! What `larder top` shows: samples of nodes, what they come to between two times, how that looks.

pub(crate) mod exposition;
pub(crate) mod render;
pub(crate) mod sample;
pub(crate) mod terminal;
pub(crate) mod view;
