//! Which found chunks a request loads, and how long its engine computes the others.

use larder_protocol::session::{Found, Tier};

use crate::trace::CHUNK_TOKENS;

/// The found chunks that a request waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// All found chunks
    #[default]
    All,
    /// The chunks that come sooner than the engine computes them, as the node decides
    Worth,
    /// The chunks in the node's own memory
    InPlace,
}

/// The chunks at the front of a prompt that are in the memory of the node.
pub(super) fn chunks_in_place(found: &Found) -> usize {
    let in_place = found.spans.iter().take_while(|span| matches!(span.tier, Tier::Device | Tier::Host));
    let end = in_place.last().map_or(0, |span| span.to as usize);
    end.min((found.tokens / CHUNK_TOKENS) as usize)
}

#[cfg(test)]
mod tests {
    use larder_protocol::session::Span;

    use super::*;

    #[test]
    fn chunks_are_in_place_up_to_the_first_that_is_elsewhere() {
        let span = |from, to, tier| Span { from, to, tier };
        let mut found = Found { tokens: 6 * CHUNK_TOKENS, spans: Vec::new(), pin: None };
        assert_eq!(chunks_in_place(&found), 0);
        found.spans = vec![span(0, 2, Tier::Host), span(2, 3, Tier::Disk), span(3, 6, Tier::Host)];
        assert_eq!(chunks_in_place(&found), 2);
        found.spans = vec![span(0, 6, Tier::Host)];
        assert_eq!(chunks_in_place(&found), 6);
        found.spans = vec![span(0, 6, Tier::Peer)];
        assert_eq!(chunks_in_place(&found), 0);
    }
}
