//! Capture requests and results: what trainers post to `/generate`, and what comes back.
//!
//! | form of a result | says where the bytes are by | read | written |
//! |---|---|---|---|
//! | store | its keys alone | yes | yes |
//! | arena | `arena: {session, control}`, an address per tensor | yes | yes |
//! | `nvlink` | the arena form under its older name | yes | as arena form |
//! | token | `session_id`, `control_endpoint`, `control_token`, an address per tensor | yes | yes |
//!
//! The arena form has three optional additions: `epoch` beside `arena`, `seq` in each feature, and
//! `arena.holder`; a failure has one, its `cause`. What an older publisher leaves out is `None`.
//!
//! A result that contradicts itself is refused: two locations, an unknown element type, a size
//! that overflows or differs from shape and element type, an address without a location or beyond
//! the address space.

mod checksum;
mod request;
mod response;
mod result;
mod sample;

use transport_core::{Error, ErrorKind};

use crate::json::{Fault, FieldFault, ListFault, Mismatch, ObjectFault, RawObject, Text};

pub use checksum::{Checksum, ChecksumKind, Mixsum};
pub use request::{CaptureRequest, Form, Prompt, Sampling};
pub use response::{Row, parse_response, write_response};
pub use result::{CaptureOutcome, FailureCause, parse_result, write_result};
pub use sample::{Passthrough, SampleRequest};

pub(crate) use result::{
    checked_nbytes, control_endpoint, feature_address, parse_meta, token_transport,
};

/// HTTP request header that names the client for whom the samples are born held.
pub const HOLDER_HEADER: &str = "x-featurestore-holder";

/// HTTP request header that asks for checksums: the kinds that the client can compare, separated by
/// commas, the one that it likes best first. The server makes the first one that it can make where
/// the tensors are, and says in each checksum which kind that is.
pub const CHECKSUMS_HEADER: &str = "x-featurestore-checksums";

/// Value of [`CHECKSUMS_HEADER`] for whatever suits the server: xxh3 of tensors in host memory,
/// mixsum of those on a device.
pub const CHECKSUMS_ANY: &str = "xxh3, mixsum";

/// HTTP request header: for how many milliseconds the request waits for room in the arena at most.
/// The server may wait for less. Then its samples fail, retryable and with a [`FailureCause`], and
/// others that wait for room have their turn.
pub const PATIENCE_HEADER: &str = "x-featurestore-patience-ms";

/// Bounds on requests and responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest body, in bytes.
    pub body_bytes: usize,
    /// Most samples in a request or response.
    pub samples: usize,
    /// Most tokens of one prompt.
    pub prompt_tokens: usize,
    /// Most tensors of one sample; at most 256.
    pub features: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { body_bytes: 64 << 20, samples: 4096, prompt_tokens: 1 << 20, features: 64 }
    }
}

/// The text of a body within its bound.
fn body_text<'a>(
    body: &'a [u8],
    limits: &Limits,
    error: impl Fn(&'static str) -> Error,
) -> Result<&'a str, Error> {
    if body.len() > limits.body_bytes {
        return Err(error("the body is too long")
            .with("found", body.len())
            .with("max_bytes", limits.body_bytes));
    }
    std::str::from_utf8(body)
        .map_err(|e| error("the body is not UTF-8").with("at", e.valid_up_to()))
}

/// The start of a text, for an error.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Turns the faults of JSON texts into errors of one operation. Never shows the text itself.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) kind: ErrorKind,
    pub(crate) operation: &'static str,
}

impl Faults {
    pub(crate) fn error(self, message: &'static str) -> Error {
        Error::new(self.kind, self.operation, message)
    }

    /// A field that is missing, of the wrong type or, given by its name alone, unusable.
    pub(crate) fn field(self, fault: impl Into<FieldFault>) -> Error {
        let FieldFault { name, why } = fault.into();
        match why {
            Fault::Missing => self.error("a field is missing").with("field", name),
            Fault::Type(Mismatch { expected, found }) => self
                .error("a field has the wrong type")
                .with("field", name)
                .with("expected", expected)
                .with("found", found),
            Fault::Value => self.error("a field is unusable").with("field", name),
        }
    }

    /// A field that has the right type and, for the reason of `error`, cannot be used.
    pub(crate) fn unusable(self, name: &'static str, error: Error) -> Error {
        self.field(name).with("why", error.message()).source(error)
    }

    pub(crate) fn missing(self, name: &'static str) -> Error {
        self.field(FieldFault { name, why: Fault::Missing })
    }

    /// A field whose text does not parse as what it has to be.
    pub(crate) fn wrong_type(self, name: &'static str, error: &serde_json::Error) -> Error {
        self.field(FieldFault { name, why: Fault::Type(Mismatch::of(error)) })
    }

    pub(crate) fn object(self, fault: ObjectFault) -> Error {
        match fault {
            ObjectFault::Syntax { at } => self.error("not JSON").with("at", at),
            ObjectFault::NotAnObject => self.error("not an object"),
            ObjectFault::Duplicate => self.error("a field appears twice"),
            ObjectFault::TooManyFields => self.error("too many fields"),
        }
    }

    /// The fields of an object that is itself a field.
    pub(crate) fn object_at<'a>(
        self,
        json: &'a str,
        field: &'static str,
    ) -> Result<RawObject<'a>, Error> {
        RawObject::parse(json).map_err(|fault| self.object(fault).with("field", field))
    }

    /// The faults of a field that holds a list.
    pub(crate) fn list(self, field: &'static str, fault: ListFault) -> Error {
        match fault {
            ListFault::Syntax { .. } => self.field(field),
            ListFault::Type(mismatch) => {
                self.field(FieldFault { name: field, why: Fault::Type(mismatch) })
            }
            ListFault::TooMany => self.error("a list is too long").with("field", field),
        }
    }

    pub(crate) fn text(self, object: &RawObject<'_>, field: &'static str) -> Result<String, Error> {
        let Text(text) = object.field(field).map_err(|field| self.field(field))?;
        Ok(text.into_owned())
    }

    /// A field that parses from text, such as a name.
    pub(crate) fn parse<T: std::str::FromStr<Err = Error>>(
        self,
        object: &RawObject<'_>,
        field: &'static str,
    ) -> Result<T, Error> {
        self.text(object, field)?.parse().map_err(|error| self.unusable(field, error))
    }
}
