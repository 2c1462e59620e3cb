//! What a publisher hands to a consumer: identity, shapes, and where the bytes are.

use indexmap::IndexMap;

use crate::{
    ClientId, Epoch, Error, ErrorKind, FeatureName, ObjectKey, RemoteAddr, Result, SampleKey,
    Sequence, SessionName, TensorMeta,
};

/// One published sample: enough to read it and to release it, from any process.
///
/// `control_proto` parses and writes every JSON form of it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Descriptor {
    /// Store, sample and generation.
    pub sample: SampleKey,
    /// Tensors by name, in the publisher's order, which is also their order in its arena.
    pub features: IndexMap<FeatureName, FeatureDescriptor>,
    /// Model layers that the hidden states were taken from, if the publisher said so.
    pub aux_layer_ids: Option<Vec<i64>>,
    /// Where the bytes are.
    pub location: Location,
}

impl Descriptor {
    /// Puts a descriptor together.
    ///
    /// Refuses an arena or token location that lacks the address of a tensor with bytes.
    pub fn new(
        sample: SampleKey,
        features: IndexMap<FeatureName, FeatureDescriptor>,
        aux_layer_ids: Option<Vec<i64>>,
        location: Location,
    ) -> Result<Self> {
        if !matches!(location, Location::Store) {
            let lost = features.iter().find(|(_, f)| f.address.is_none() && f.meta.nbytes() > 0);
            if let Some((name, _)) = lost {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "describe sample",
                    "a tensor of an addressed sample has no address",
                )
                .with("key", sample.object(name)));
            }
        }
        Ok(Self { sample, features, aux_layer_ids, location })
    }

    /// Bytes of all tensors together.
    pub fn nbytes(&self) -> u64 {
        self.features.values().map(|f| f.meta.nbytes()).sum()
    }

    /// Key of each tensor, in order.
    pub fn keys(&self) -> impl Iterator<Item = ObjectKey> + '_ {
        self.features.keys().map(|name| self.sample.object(name))
    }

    /// The publisher's life, if it says which.
    pub fn epoch(&self) -> Option<Epoch> {
        match &self.location {
            Location::Arena(arena) => arena.epoch,
            _ => None,
        }
    }
}

/// One tensor of a published sample.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FeatureDescriptor {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Where its bytes start in the publisher's address space; none in the store form.
    pub address: Option<RemoteAddr>,
    /// Which life of its key this is; absent from older publishers.
    pub seq: Option<Sequence>,
}

impl FeatureDescriptor {
    /// A tensor at `address`.
    pub fn new(meta: TensorMeta, address: Option<RemoteAddr>, seq: Option<Sequence>) -> Self {
        Self { meta, address, seq }
    }
}

/// Where the bytes of a sample are, by the form in which it was described.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Location {
    /// Mooncake Store: one object per tensor under its key.
    Store,
    /// An arena: addresses in one process, freed by key.
    Arena(ArenaLocation),
    /// Buffers behind a token-authenticated control endpoint, freed by sample.
    Token(TokenLocation),
}

/// Where an arena is reached.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ArenaLocation {
    /// Data session, `host:port` of the peer handshake.
    pub session: SessionName,
    /// Control listener that takes frees.
    pub control: SessionName,
    /// Life of the publishing process; absent from older publishers.
    pub epoch: Option<Epoch>,
    /// Client on whose behalf the publisher already holds the sample; see
    /// [`Publication::holder`](crate::Publication::holder).
    pub holder: Option<ClientId>,
}

impl ArenaLocation {
    /// An arena at `session`, freed through `control`.
    pub fn new(session: SessionName, control: SessionName, epoch: Option<Epoch>) -> Self {
        Self { session, control, epoch, holder: None }
    }
}

/// Where token-authenticated buffers are reached.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct TokenLocation {
    /// `rdma`, `nvlink` or `nvlink_intra`.
    pub transport: String,
    /// Data session.
    pub session: SessionName,
    /// Control endpoint.
    pub control: SessionName,
    /// Secret that the control endpoint asks for; not printed by `Debug`.
    pub token: String,
}

impl TokenLocation {
    /// Buffers at `session`, released through `control` with `token`.
    pub fn new(
        transport: impl Into<String>,
        session: SessionName,
        control: SessionName,
        token: impl Into<String>,
    ) -> Self {
        Self { transport: transport.into(), session, control, token: token.into() }
    }
}

impl std::fmt::Debug for TokenLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenLocation")
            .field("transport", &self.transport)
            .field("session", &self.session)
            .field("control", &self.control)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Generation, SampleId, StoreId};

    #[test]
    fn an_arena_sample_needs_addresses_but_empty_tensors_do_not() {
        let sample =
            SampleKey::new(StoreId::new("s").unwrap(), SampleId::new("a").unwrap(), Generation(1));
        let session: SessionName = "127.0.0.1:1".parse().unwrap();
        let arena = Location::Arena(ArenaLocation::new(session.clone(), session, None));
        let feature = |rows| {
            let meta = TensorMeta::new(Dtype::Int64, [rows]).unwrap();
            IndexMap::from([(
                FeatureName::new("x").unwrap(),
                FeatureDescriptor::new(meta, None, None),
            )])
        };
        let error = Descriptor::new(sample.clone(), feature(1), None, arena.clone()).unwrap_err();
        assert_eq!(error.context("key"), Some("s/a/g1/x"));
        assert!(Descriptor::new(sample.clone(), feature(0), None, arena).is_ok());
        assert!(Descriptor::new(sample, feature(1), None, Location::Store).is_ok());
    }

    #[test]
    fn tokens_are_not_printed() {
        let session: SessionName = "127.0.0.1:1".parse().unwrap();
        let location = TokenLocation::new("rdma", session.clone(), session, "hush");
        assert!(!format!("{location:?}").contains("hush"));
    }
}
