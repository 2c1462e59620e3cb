//! Schemas: what they take, what they refuse, and that both layouts give it back.

use indexmap::IndexMap;
use rollout_codec::{
    Array, Codec, Column, FieldSchema, Library, Rollout, RowShape, Schema, Template, Value, json,
    mooncake::{MemoryStore, Place, Reader, Reference, Writer, cleanup},
    native::{Header, Options, Plan, RolloutView},
    notation::{self, Layout},
};
use transport_core::{Dtype, TensorMeta};

use crate::any::same_rollout;

fn value(text: &str) -> Value {
    json::parse(text.as_bytes()).unwrap()
}

fn tensor(dtype: Dtype, shape: &[u64]) -> Value {
    let meta = TensorMeta::new(dtype, shape).unwrap();
    let data: Vec<u8> = (0..meta.nbytes()).map(|i| i as u8).collect();
    Value::Array(Array::new(Library::Torch, meta, data).unwrap())
}

/// What slime's rollout side hands over, with everything that is optional.
fn slime() -> IndexMap<String, Value> {
    let tensors = |dtype, lengths: &[u64]| {
        Value::List(lengths.iter().map(|&len| tensor(dtype, &[len])).collect())
    };
    let experts = [8, 4].map(|len| tensor(Dtype::Int32, &[len, 2, 2])).to_vec();
    let pixels: IndexMap<String, Value> =
        [("pixels".to_owned(), tensor(Dtype::Bfloat16, &[3, 2]))].into_iter().collect();
    [
        ("partition", value("[0,3]")),
        ("tokens", tensors(Dtype::Int64, &[9, 5])),
        ("loss_masks", tensors(Dtype::Int32, &[4, 0])),
        ("response_lengths", value("[4,0]")),
        ("rewards", value("[0.1,-0.5]")),
        ("truncated", value("[0,1]")),
        ("sample_indices", value("[7,null]")),
        ("rollout_ids", value("[1,1]")),
        ("rollout_mask_sums", tensor(Dtype::Float32, &[2])),
        ("rollout_log_probs", tensors(Dtype::Float32, &[4, 0])),
        ("teacher_log_probs", tensors(Dtype::Float32, &[4, 0])),
        ("rollout_top_p_token_ids", tensors(Dtype::Int32, &[7, 0])),
        ("rollout_top_p_token_offsets", tensors(Dtype::Int32, &[5, 1])),
        ("rollout_routed_experts", Value::List(experts)),
        ("multimodal_train_inputs", Value::List(vec![Value::Map(pixels), Value::Null])),
        ("source_names", value(r#"["math","unknown"]"#)),
        ("round_number", value("[0,0]")),
        ("prompt", value(r#"["a",[{"role":"user","content":"é"}]]"#)),
        ("metadata", value(r#"[{"k":[1,2.5,null]},null]"#)),
        ("raw_reward", value("[1.0,0,1,{\"a\":1}]")),
        ("total_lengths", value("[9,5,3,2]")),
        ("global_batch_sizes", value("[2]")),
        ("num_microbatches", value("[1]")),
        ("micro_batch_indices", value("[[0],[1]]")),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

fn native(rollout: &Rollout<'_>) -> RolloutView {
    let (header, data) = Plan::new(rollout, &Options::default()).unwrap().encode(1).unwrap();
    RolloutView::new(Header::parse(&header).unwrap(), data).unwrap()
}

/// The values of a rollout by name, as they were handed over.
fn values(rollout: &Rollout<'_>) -> IndexMap<String, Value> {
    let column = |(name, column): (&String, &Column<'_>)| {
        let value = match column {
            Column::Dense(dense) => Value::Array(dense.to_array()),
            column => Value::List(column.to_values().unwrap()),
        };
        (name.clone(), value)
    };
    let columns = rollout.batch.iter().chain(&rollout.non_tensor).map(column);
    columns.chain(rollout.meta.iter().map(|(n, v)| (n.clone(), v.clone()))).collect()
}

#[test]
fn slimes_dict_comes_back_as_it_was() {
    for schema in [Schema::slime().strict(), Schema::slime(), Schema::new()] {
        let dict = slime();
        let schema = match schema.fields().is_empty() {
            // Without a schema, lists that are no columns must be told apart.
            true => ["raw_reward", "total_lengths", "micro_batch_indices"]
                .iter()
                .fold(schema, |schema, name| schema.field(*name, FieldSchema::meta())),
            false => schema,
        };
        let rollout = schema.rollout(&dict).unwrap();
        let view = native(&rollout);
        schema.check(view.header()).unwrap();
        let mut back = values(&view.rollout().unwrap());
        for (name, expected) in &dict {
            let found = back.shift_remove(name).unwrap();
            assert!(found.same(expected), "{name}: {found:?} instead of {expected:?}");
        }
        assert!(back.is_empty());
        // Two store keys, whatever the number of fields.
        assert!(view.header().fields().count() == dict.len());
    }
}

#[test]
fn slimes_dict_goes_through_mooncakes_layout() {
    let mut dict = slime();
    for name in ["sample_indices", "prompt", "multimodal_train_inputs", "rewards"] {
        dict.shift_remove(name);
    }
    dict.insert("rewards".into(), value("[0.1,-0.5]"));
    dict.insert("prompt".into(), value(r#"["a","b"]"#));
    let rollout = Schema::slime_mooncake().rollout(&dict).unwrap();
    let mut store = MemoryStore::default();
    let place = Place { partition: "dp0".into(), ..Place::default() };
    let reference = Writer::new(&mut store, "slime-rollout")
        .unwrap()
        .put(&rollout, &place, &Default::default())
        .unwrap();
    let reference =
        Reference::parse(reference.to_json(json::Style::COMPACT).unwrap().as_bytes()).unwrap();
    let back = Reader::new(&store).rollout(&reference).unwrap();
    assert!(same_rollout(&rollout, &back));
    let shown = notation::decoded(&back, Layout::Flat).unwrap();
    let rewards = shown.get("values").unwrap().get("rewards").unwrap().as_list().unwrap();
    assert_eq!(rewards[0], Value::Float(0.1f32.into()), "rounded, as that schema asks for");
    assert_eq!(cleanup(&mut store, &reference).unwrap() as usize, reference_objects(&reference));
    assert!(store.is_empty());
    // Only some fields.
    assert!(Reader::new(&store).fields(&reference, |name| name == "tokens").is_err(), "cleaned");
}

fn reference_objects(reference: &Reference) -> usize {
    let encoded: usize = reference.encoded.values().map(|encoded| encoded.members.len()).sum();
    let whole = reference.fields.len() - reference.encoded.len();
    encoded + whole + 2 // metadata and manifest; no member here is empty
}

#[test]
fn miles_has_smaller_tokens_and_more_fields() {
    let schema = Schema::miles();
    assert_eq!(schema.fields()["tokens"].dtype, Some(Dtype::Int32));
    for name in ["rollout_indexer_topk", "opd_reverse_kl", "weight_versions"] {
        assert!(schema.fields().contains_key(name));
        assert!(!Schema::slime().fields().contains_key(name));
    }
    let error = schema.rollout(&slime()).unwrap_err();
    assert_eq!(error.context("field"), Some("tokens"));
    assert_eq!((error.context("expected"), error.context("found")), (Some("int32"), Some("int64")));
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_row() {
    let dict = |name: &str, text: &str| {
        [(name.to_owned(), value(text))].into_iter().collect::<IndexMap<_, _>>()
    };
    let schema = Schema::slime().strict();
    for (name, text, row) in [
        ("partition", "[1,null]", Some("1")),
        ("partition", "[1,2.5]", Some("1")),
        ("partition", "[1,9223372036854775808]", Some("1")),
        ("source_names", "[\"a\",1]", Some("1")),
        ("tokens", "[[1,2],[\"x\"]]", Some("1")),
        ("tokens", "[[1,2],null]", Some("1")),
        ("unheard_of", "[1]", None),
        ("partition", "{}", None),
    ] {
        let error = schema.rollout(&dict(name, text)).unwrap_err();
        assert_eq!(error.context("field"), Some(name), "{error}");
        assert_eq!(error.context("row"), row, "{error}");
    }
    let error = Schema::new()
        .rollout(
            &[("a".to_owned(), value("[1,2]")), ("b".to_owned(), value("[1]"))]
                .into_iter()
                .collect(),
        )
        .unwrap_err();
    assert!(error.to_string().contains("number of rows"), "{error}");
}

/// F50: the stored schema is compared with the reader's before anything is read.
#[test]
fn readers_that_expect_something_else_are_told() {
    let mut dict = slime();
    dict.retain(|name, _| matches!(name.as_str(), "tokens" | "partition" | "raw_reward"));
    let view = native(&Schema::slime().rollout(&dict).unwrap());
    let check = |schema: Schema| schema.check(view.header());
    check(Schema::slime().strict()).unwrap();
    check(Schema::new()).unwrap();
    let ragged = || FieldSchema::new(Codec::RaggedTensor);
    for (name, field) in [
        ("tokens", ragged().dtype(Dtype::Int32)),
        ("tokens", ragged().shape(RowShape::Ragged(1))),
        ("tokens", ragged().shape(RowShape::Exactly(Template::tail([2])))),
        ("tokens", FieldSchema::new(Codec::Utf8)),
        ("partition", FieldSchema::new(Codec::Tensor)),
        ("raw_reward", FieldSchema::new(Codec::Auto)),
    ] {
        let error = check(Schema::new().field(name, field)).unwrap_err();
        assert_eq!(error.context("field"), Some(name), "{error}");
        assert!(error.context("expected").is_some() && error.context("found").is_some());
    }
    assert!(check(Schema::new().strict()).is_err(), "fields that are not listed");
}

#[test]
fn mooncakes_schemas_are_read() {
    let schema = Schema::from_value(&value(
        r#"{"tokens":{"codec":"typed_ragged","nullable":false,
            "metadata":{"section":"non_tensor_batch","dtype":"int32"}},
            "x":{"codec":"auto","metadata":{"section":"meta_info"}}}"#,
    ))
    .unwrap();
    let rollout = schema
        .rollout(
            &[("tokens".to_owned(), value("[[1,2],[]]")), ("x".to_owned(), value("{\"y\":1}"))]
                .into_iter()
                .collect(),
        )
        .unwrap();
    assert_eq!(rollout.column("tokens").unwrap().dtype(), Some(Dtype::Int32));
    assert_eq!(rollout.meta["x"], value("{\"y\":1}"));
    for text in [
        "[]",
        r#"{"x":{}}"#,
        r#"{"x":{"codec":"pickle"}}"#,
        r#"{"x":{"codec":"auto","metadata":{"section":"elsewhere"}}}"#,
        r#"{"x":{"codec":"auto","metadata":{"dtype":"float7"}}}"#,
    ] {
        assert!(Schema::from_value(&value(text)).is_err(), "{text}");
    }
}
