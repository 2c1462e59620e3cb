//! Comparing what a reader expects with what a rollout holds.

use transport_core::{Error, ErrorKind, Result};

use crate::{
    Codec, RowShape, Schema,
    native::{FieldInfo, Header},
};

impl Schema {
    /// Checks that a stored rollout is what this schema says, before any of it is read: sections,
    /// kinds, element types and shapes of the fields that both know.
    ///
    /// Fields come and go with the options of a run: one that is listed but not stored is no
    /// error here, but where it is read. A stored field that is not listed is one if the schema is
    /// strict. The order does not matter.
    pub fn check(&self, header: &Header) -> Result<()> {
        for found in header.fields() {
            match self.fields().get(found.name) {
                Some(expected) => self.check_field(expected, &found, header)?,
                None if self.is_strict() => {
                    return Err(mismatch(&found, "a field that the schema does not list")
                        .remedy("add the field to the schema, or use one that is not strict"));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn check_field(
        &self,
        expected: &crate::FieldSchema,
        found: &FieldInfo<'_>,
        header: &Header,
    ) -> Result<()> {
        if expected.section != found.section {
            return Err(mismatch(found, "a field of another section")
                .with("expected", expected.section.name())
                .with("found", found.section.name()));
        }
        if let Some(kind) = kind_of(expected.codec)
            && kind != found.kind
        {
            return Err(mismatch(found, "a field of another kind")
                .with("expected", kind)
                .with("found", found.kind));
        }
        if let (Some(dtype), Some(stored)) = (expected.dtype, found.dtype)
            && dtype != stored
        {
            return Err(mismatch(found, "a field of another element type")
                .with("expected", dtype)
                .with("found", stored));
        }
        let template = header.template(found.name);
        let fits = match (&expected.shape, &template) {
            (RowShape::Any, _) => true,
            (_, None) => found.kind != "ragged",
            (RowShape::Ragged(dim), Some(template)) => template.before.len() == *dim,
            (RowShape::Exactly(expected), Some(template)) => expected == template,
        };
        if !fits {
            return Err(mismatch(found, "rows of another shape")
                .with("expected", format_args!("{:?}", expected.shape))
                .with("found", format_args!("{template:?}")));
        }
        Ok(())
    }
}

fn mismatch(found: &FieldInfo<'_>, why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, "check schema", why).with("field", found.name)
}

/// What a header calls columns of a codec; `None` if it can be any.
fn kind_of(codec: Codec) -> Option<&'static str> {
    Some(match codec {
        Codec::Auto => return None,
        Codec::Tensor => "dense",
        Codec::Ndarray => "scalars",
        Codec::TypedRagged | Codec::RaggedTensor => "ragged",
        Codec::RaggedTensorDict => "tensor_dict",
        Codec::Bytes => "bytes",
        Codec::Media => "media",
        Codec::MediaList => "media_list",
        Codec::Utf8 => "utf8",
        Codec::Json => "json",
        Codec::MessagePack => "message_pack",
        Codec::Nested => "nested",
    })
}
