//! The native layout: what goes in comes out, bit for bit, from memory that stays alive.

use proptest::prelude::*;
use rollout_codec::{
    Column, Library, Ragged, Rollout, RowKind, Scalars, Template, Value,
    native::{Dedup, Header, Options, Plan, ReadLimits, ReadRequest, RolloutView, read_plan},
    payload::{Payload, Profile},
};
use transport_core::{Dtype, ErrorKind, RegionSlice};

use crate::any::{any_rollout, same_rollout};

fn encode(rollout: &Rollout<'_>, options: &Options, threads: usize) -> (Vec<u8>, RegionSlice) {
    let plan = Plan::new(rollout, options).unwrap();
    let (header, data) = plan.encode(threads).unwrap();
    assert_eq!(header.len() as u64, plan.header_bytes());
    assert_eq!(data.len() as u64, plan.data_bytes());
    (header, data)
}

fn view(header: &[u8], data: RegionSlice) -> RolloutView {
    RolloutView::new(Header::parse(header).unwrap(), data).unwrap()
}

/// Gathers in parts, backwards, into memory that is not zero, and compares with the whole.
fn check_parts(plan: &Plan<'_>, bytes: u64) -> usize {
    let (header, data) = plan.encode(1).unwrap();
    let parts = plan.parts(bytes);
    assert_eq!(parts.first().map(|p| p.start), Some(0));
    assert_eq!(parts.last().map(|p| p.end), Some(plan.data_bytes()));
    assert!(parts.windows(2).all(|p| p[0].end == p[1].start && !p[0].is_empty()), "{parts:?}");
    let mut sums = Vec::new();
    for part in parts.iter().rev() {
        let mut gathered = vec![0xff; (part.end - part.start) as usize];
        sums.push(plan.encode_part(part, &mut gathered, 2).unwrap());
        assert_eq!(&gathered, &data.as_ref()[part.start as usize..part.end as usize]);
    }
    assert_eq!(plan.join(sums.clone()).unwrap(), header);
    let doubled = [sums.clone(), sums.clone()].concat();
    let has_sums = plan.join(Vec::new()).is_err();
    assert_eq!(plan.join(doubled).is_err(), has_sums, "with sums, each block counts once");
    parts.len()
}

#[test]
fn parts_end_where_blocks_end() {
    let payload = Payload::new(Profile::Text, 3 << 20);
    let rollout = payload.rollout();
    let plan = Plan::new(&rollout, &Options::default()).unwrap();
    assert_eq!(check_parts(&plan, u64::MAX), 1);
    assert_eq!(check_parts(&plan, 1 << 20), 4);
    assert!(check_parts(&plan, 1) >= 24, "at least one a block of 128 KiB");
    let mut short = [0; 8];
    assert!(plan.encode_part(&(0..9), &mut short, 1).is_err());
    assert!(plan.encode_part(&(plan.data_bytes()..plan.data_bytes() + 8), &mut short, 1).is_err());
    let empty = Rollout::default();
    assert_eq!(check_parts(&Plan::new(&empty, &Options::default()).unwrap(), 1), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_rollout_survives(rollout in any_rollout(), threads in 0usize..4, sums: bool) {
        for dedup in [Dedup::None, Dedup::SameMemory, Dedup::SameBytes] {
            let options = Options::default().checksums(sums).dedup(dedup).generation(7);
            let (header, data) = encode(&rollout, &options, threads);
            let view = view(&header, data.clone());
            prop_assert_eq!(view.header().generation(), 7);
            prop_assert_eq!(view.verify(2).is_ok(), sums || view.header().fields().count() == 0);
            let back = view.rollout().unwrap();
            prop_assert!(same_rollout(&rollout, &back), "{:?}\n{:?}", rollout, back);
            // Encoding is a function of the rollout: what was read encodes to the same bytes.
            let (again_header, again) = encode(&back, &options, 1);
            prop_assert_eq!(again_header, header);
            prop_assert_eq!(again.as_ref(), data.as_ref());
        }
    }

    #[test]
    fn parts_are_the_whole(rollout in any_rollout(), bytes in 1u64..2000, sums: bool) {
        let plan = Plan::new(&rollout, &Options::default().checksums(sums)).unwrap();
        check_parts(&plan, bytes);
    }

    #[test]
    fn pieces_are_the_data(rollout in any_rollout(), sums: bool) {
        let plan = Plan::new(&rollout, &Options::default().checksums(sums)).unwrap();
        let (header, data) = plan.encode(2).unwrap();
        let pieces: Vec<u8> =
            plan.as_iovecs().unwrap().iter().flat_map(|piece| piece.to_vec()).collect();
        prop_assert_eq!(&pieces[..], data.as_ref());
        prop_assert_eq!(plan.header().unwrap(), header);
    }

    #[test]
    fn any_damage_to_the_header_is_seen(
        rollout in any_rollout(), at: prop::sample::Index, flip in 1u8..,
    ) {
        let (mut header, _) = encode(&rollout, &Options::default(), 1);
        let at = at.index(header.len());
        header[at] ^= flip;
        prop_assert!(Header::parse(&header).is_err());
        prop_assert!(Header::parse(&header[..at]).is_err());
    }

    #[test]
    fn damaged_data_never_panics_and_checksums_see_it(
        rollout in any_rollout(), at: prop::sample::Index, flip in 1u8..,
    ) {
        let (header, data) = encode(&rollout, &Options::default(), 1);
        prop_assume!(!data.is_empty());
        let mut bytes = data.as_ref().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        let view = view(&header, RegionSlice::copy_of(&bytes));
        let read = view.rollout();
        let padding = view.verify(1).is_ok();
        if padding {
            prop_assert!(same_rollout(&rollout, &read.unwrap()));
        } else if let Ok(read) = read {
            for column in read.batch.values().chain(read.non_tensor.values()) {
                let _ = column.to_values();
            }
        }
    }
}

#[test]
fn threads_and_blocks_make_no_difference() {
    let payload = Payload::new(Profile::TextTeacher, 8 << 20);
    let rollout = payload.rollout();
    let (header, data) = encode(&rollout, &Options::default(), 1);
    for threads in [2, 3, 8] {
        let (h, d) = encode(&rollout, &Options::default(), threads);
        assert_eq!(h, header);
        assert!(d.as_ref() == data.as_ref());
    }
    let view = view(&header, data);
    view.verify(3).unwrap();
    for field in payload.fields() {
        let rows = view.ragged(field.name).unwrap();
        for (row, expected) in rows.iter().zip(&field.rows) {
            assert!(row.unwrap().bytes() == &**expected);
        }
    }
}

#[test]
fn views_share_the_data_and_keep_it_alive() {
    let payload = Payload::new(Profile::TextExperts, 1 << 20);
    let rollout = payload.rollout();
    let (header, data) = encode(&rollout, &Options::default(), 2);
    let range = data.address()..data.address() + data.len();
    let view = view(&header, data);
    let experts = view.ragged("rollout_routed_experts").unwrap();
    let (p, r) = payload.lengths().next().unwrap();
    assert_eq!(experts.shape(0).unwrap(), [p + r - 1, 48, 8]);
    let row = experts.row_region(0).unwrap();
    let column = view.column("tokens").unwrap();
    drop((view, experts));
    assert!(range.contains(&row.address()), "no copy");
    assert!(row.as_ref() == &*payload.fields()[3].rows[0], "still readable");
    let Column::Ragged(tokens) = column else { panic!() };
    assert!(range.contains(&(tokens.row(0).unwrap().as_ptr() as usize)), "no copy");
    assert!(tokens.row(0).unwrap() == &*payload.fields()[0].rows[0]);
}

#[test]
fn rows_are_typed_slices_and_can_be_cut() {
    let rows: [&[i32]; 3] = [&[1, 2, 3], &[], &[4, 5]];
    let mut rollout = Rollout::default();
    let column = Column::Ragged(Ragged::from_rows(RowKind::Numpy, rows));
    rollout.non_tensor.insert("x".into(), column);
    let (header, data) = encode(&rollout, &Options::default(), 1);
    let x = view(&header, data).ragged("x").unwrap();
    assert_eq!(x.row(0).unwrap().elements::<i32>().unwrap(), [1, 2, 3]);
    assert!(x.row(0).unwrap().elements::<f32>().is_none(), "another type");
    assert_eq!(x.sub_row(0, 1..3).unwrap().elements::<i32>().unwrap(), [2, 3]);
    assert!(x.sub_row(0, 1..4).is_none());
    assert!(x.sub_row(1, 0..0).unwrap().bytes().is_empty());
    assert!(x.row(3).is_none());
}

#[test]
fn rows_and_arrays_are_tensors_over_the_same_memory() {
    let payload = Payload::new(Profile::TextExperts, 1 << 20);
    let mut rollout = payload.rollout();
    let mut nulls = Ragged::new(Dtype::Int8, RowKind::Torch, Template::flat()).unwrap();
    (0..payload.rows()).for_each(|_| nulls.push_null());
    rollout.non_tensor.insert("nulls".into(), Column::Ragged(nulls));
    let (header, data) = encode(&rollout, &Options::default(), 1);
    let range = data.address()..data.address() + data.len();
    let view = view(&header, data);
    let experts = view.ragged("rollout_routed_experts").unwrap();
    let row = experts.row_tensor(0).unwrap();
    assert_eq!(row.meta.shape(), experts.shape(0).unwrap());
    assert_eq!(row.meta.dtype(), Dtype::Int32);
    assert!(view.ragged("nulls").unwrap().row_tensor(0).is_none());
    assert!(experts.row_tensor(payload.rows()).is_none());
    let sums = view.dense("rollout_mask_sums").unwrap();
    assert_eq!(sums.meta.shape(), [payload.rows() as u64]);
    assert_eq!(view.dense("tokens").unwrap_err().kind(), ErrorKind::InvalidInput);
    drop((view, experts));
    assert!(range.contains(&row.data.address()) && range.contains(&sums.data.address()));
    assert!(row.data.as_ref() == &*payload.fields()[3].rows[0], "still readable");
}

#[test]
fn rows_join_to_one_array_where_they_are_one() {
    let row = [1i64, 2, 3].map(i64::to_le_bytes).concat();
    let flat = || {
        let mut rows = Ragged::new(Dtype::Int64, RowKind::Torch, Template::flat()).unwrap();
        rows.push(row[..8].to_vec()).unwrap();
        rows.push_null();
        rows.push(row.clone()).unwrap();
        rows.push(row.clone()).unwrap();
        Column::Ragged(rows)
    };
    let flat_of = |column: Column<'_>, options: Options| {
        let mut rollout = Rollout::default();
        rollout.non_tensor.insert("rows".into(), column);
        let (header, data) = encode(&rollout, &options, 1);
        view(&header, data).ragged("rows").unwrap().flat()
    };
    for options in [Options::default(), Options::default().narrow("rows", Dtype::Int8)] {
        let (values, offsets) = flat_of(flat(), options).unwrap();
        assert_eq!((values.meta.dtype(), values.meta.shape()), (Dtype::Int64, &[7][..]));
        assert_eq!(values.data.as_ref(), [&row[..8], &row, &row].concat());
        assert_eq!((offsets.meta.dtype(), offsets.meta.shape()), (Dtype::Int64, &[5][..]));
        assert_eq!(offsets.data.as_ref(), [0i64, 1, 1, 4, 7].map(i64::to_le_bytes).concat());
    }
    let shared = Options::default().dedup(Dedup::SameBytes);
    assert!(flat_of(flat(), shared).is_none(), "rows that share bytes are no one array");
    let before = Template { before: [2].into(), after: [].into() };
    let mut rows = Ragged::new(Dtype::Int64, RowKind::Torch, before).unwrap();
    rows.push_shaped(&[2, 1], row[..16].to_vec()).unwrap();
    assert!(flat_of(Column::Ragged(rows), Options::default()).is_none(), "ragged further in");
    let mut rows = Ragged::irregular(Dtype::Int64, RowKind::Torch);
    rows.push_shaped(&[1, 3], row.clone()).unwrap();
    rows.push_shaped(&[1], row[..8].to_vec()).unwrap();
    assert!(flat_of(Column::Ragged(rows), Options::default()).is_none(), "shapes of their own");
}

#[test]
fn numbers_without_nulls_are_an_array_too() {
    let numbers = [1.5f64, -0.0].map(f64::to_le_bytes).concat();
    let mut rollout = Rollout::default();
    let full = Scalars::new(Dtype::Float64, numbers.clone()).unwrap();
    let nulls = Scalars::with_nulls(Dtype::Float64, numbers.clone(), vec![false, true]).unwrap();
    rollout.non_tensor.insert("full".into(), Column::Scalars(full));
    rollout.non_tensor.insert("nulls".into(), Column::Scalars(nulls));
    let (header, data) = encode(&rollout, &Options::default(), 1);
    let view = view(&header, data);
    let tensor = view.dense("full").unwrap();
    assert_eq!((tensor.meta.shape(), tensor.data.as_ref()), (&[2][..], &numbers[..]));
    let error = view.dlpack("nulls").unwrap_err();
    assert_eq!((error.kind(), error.context("field")), (ErrorKind::InvalidInput, Some("nulls")));
}

/// F44: raw bits of every element type; F47: no bytes, no rows.
#[test]
fn every_element_type_keeps_its_bits() {
    for dtype in Dtype::ALL {
        let size = dtype.size() as usize;
        let patterns: Vec<u8> = (0..=255).collect();
        let mut column = Ragged::new(dtype, RowKind::Torch, Template::flat()).unwrap();
        column.push(patterns.clone()).unwrap();
        column.push(vec![]).unwrap();
        column.push(vec![0xff; size]).unwrap();
        let mut rollout = Rollout::default();
        rollout.non_tensor.insert("x".into(), Column::Ragged(column));
        let (header, data) = encode(&rollout, &Options::default(), 1);
        let x = view(&header, data).ragged("x").unwrap();
        assert_eq!(x.dtype(), dtype);
        assert_eq!(x.row(0).unwrap().bytes(), patterns);
        assert_eq!(x.shape(1).unwrap(), [0]);
        assert_eq!(x.row(2).unwrap().bytes(), vec![0xff; size]);
    }
    let mut rollout = Rollout::default();
    let empty = Ragged::new(Dtype::Bfloat16, RowKind::Torch, Template::tail([0, 128])).unwrap();
    rollout.non_tensor.insert("none".into(), Column::Ragged(empty));
    let (header, data) = encode(&rollout, &Options::default(), 1);
    let none = view(&header, data).ragged("none").unwrap();
    assert_eq!((none.len(), none.dtype()), (0, Dtype::Bfloat16));
    assert_eq!(none.template().unwrap(), &Template::tail([0, 128]));
    let (header, data) = encode(&Rollout::default(), &Options::default(), 4);
    assert_eq!((data.len(), view(&header, data).rollout().unwrap().rows().unwrap()), (0, 0));
}

/// F45 and F46: the layout is the schema's, and exactly the encoded elements come back.
#[test]
fn equal_lengths_are_laid_out_like_unequal_ones() {
    let template = Template { before: [3].into(), after: [2].into() };
    let layout = |lengths: &[u64]| {
        let mut column = Ragged::new(Dtype::Int16, RowKind::Torch, template.clone()).unwrap();
        for &length in lengths {
            let bytes: Vec<u8> = (0..3 * length * 2 * 2).map(|i| i as u8).collect();
            column.push(bytes).unwrap();
        }
        let mut rollout = Rollout::default();
        rollout.non_tensor.insert("x".into(), Column::Ragged(column));
        let (header, data) = encode(&rollout, &Options::default(), 1);
        let x = view(&header, data).ragged("x").unwrap();
        for (i, &length) in lengths.iter().enumerate() {
            assert_eq!(x.shape(i).unwrap(), [3, length, 2]);
            assert_eq!(x.row(i).unwrap().bytes().len() as u64, 12 * length);
        }
        x.template().unwrap().clone()
    };
    for lengths in [&[2, 2, 2][..], &[3], &[0], &[1, 7, 0], &[9, 9]] {
        assert_eq!(layout(lengths), template);
    }
}

#[test]
fn narrowed_fields_come_back_as_they_were() {
    let payload = Payload::new(Profile::TextExperts, 1 << 20);
    let rollout = payload.rollout();
    let plain = Plan::new(&rollout, &Options::default()).unwrap();
    let options = Options::default()
        .narrow("tokens", Dtype::Uint32)
        .narrow("loss_masks", Dtype::Uint8)
        .narrow("rollout_routed_experts", Dtype::Uint8)
        .narrow("partition", Dtype::Int16);
    let plan = Plan::new(&rollout, &options).unwrap();
    assert!(plan.data_bytes() * 3 < plain.data_bytes());
    assert_eq!(plan.as_iovecs().unwrap_err().kind(), ErrorKind::Unsupported);
    let (header, data) = encode(&rollout, &options, 2);
    let view = view(&header, data);
    view.verify(1).unwrap();
    assert!(same_rollout(&rollout, &view.rollout().unwrap()));
    let info = view.header().fields().find(|field| field.name == "loss_masks").unwrap();
    assert_eq!((info.dtype, info.wire), (Some(Dtype::Int32), Some(Dtype::Uint8)));

    let too_narrow = Options::default().narrow("tokens", Dtype::Int16);
    let plan = Plan::new(&rollout, &too_narrow).unwrap();
    let error = plan.encode(2).unwrap_err();
    assert_eq!(error.context("field"), Some("tokens"), "{error}");
    for options in [
        Options::default().narrow("tokens", Dtype::Float32),
        Options::default().narrow("rollout_log_probs", Dtype::Float16),
        Options::default().narrow("source_names", Dtype::Int8),
        Options::default().narrow("nothing", Dtype::Int8),
    ] {
        assert!(Plan::new(&rollout, &options).is_err());
    }
}

#[test]
fn shared_rows_are_stored_once() {
    let image = vec![7u8; 1000];
    let other = image.clone();
    let mut column = Ragged::new(Dtype::Uint8, RowKind::Torch, Template::tail([10])).unwrap();
    for _ in 0..8 {
        column.push(&image[..]).unwrap();
    }
    column.push_null();
    column.push(&other[..]).unwrap();
    let mut rollout = Rollout::default();
    rollout.non_tensor.insert("pixels".into(), Column::Ragged(column));
    let bytes = |dedup| {
        let options = Options::default().dedup(dedup);
        let (header, data) = encode(&rollout, &options, 1);
        let len = data.len();
        let view = view(&header, data);
        assert!(same_rollout(&rollout, &view.rollout().unwrap()));
        let pixels = view.ragged("pixels").unwrap();
        assert_eq!(pixels.shape(7).unwrap(), [100, 10]);
        assert!(pixels.row(8).is_none() && pixels.row(9).is_some());
        len
    };
    assert!(bytes(Dedup::None) > 9000);
    assert!(bytes(Dedup::SameMemory) < 2500);
    assert!(bytes(Dedup::SameBytes) < 1500);
}

#[test]
fn some_rows_and_parts_of_rows_are_read_alone() {
    let payload = Payload::new(Profile::TextExperts, 32 << 20);
    let rollout = payload.rollout();
    let (header, data) = encode(&rollout, &Options::default(), 2);
    let header = Header::parse(&header).unwrap();
    let remote = data.as_ref();
    let mut fetched = 0;
    let mut locate = |name: &str| {
        header
            .locator(name, |range| {
                fetched += range.end - range.start;
                Ok(data.slice(range.start as usize..range.end as usize).unwrap())
            })
            .unwrap()
    };
    let (tokens, experts) = (locate("tokens"), locate("rollout_routed_experts"));
    let index_bytes = 2 * 8 * (payload.rows() as u64 + 1);
    assert_eq!(fetched, index_bytes, "only offsets are read to find rows");
    let steps = [5..17, 0..1];
    let requests = [
        ReadRequest { field: &tokens, rows: &[2, 0, 2], steps: None },
        ReadRequest { field: &experts, rows: &[1, 0], steps: Some(&steps) },
    ];
    let row = |field: usize, row: usize| &*payload.fields()[field].rows[row];
    for limits in [
        ReadLimits::default(),
        ReadLimits { merge_gap: 0, ..ReadLimits::default() },
        ReadLimits { merge_gap: 0, max_fragments: 2, ..ReadLimits::default() },
        ReadLimits { merge_gap: u64::MAX, ..ReadLimits::default() },
    ] {
        let plan = read_plan(&requests, limits).unwrap();
        assert!(plan.fragments().len() <= limits.max_fragments);
        let mut local = vec![0; plan.local_bytes() as usize];
        for f in plan.fragments() {
            let (from, to) = (f.remote as usize, f.local as usize);
            local[to..to + f.len as usize].copy_from_slice(&remote[from..from + f.len as usize]);
        }
        let at = |request, i| {
            let place = plan.place(request, i).unwrap();
            &local[place.start as usize..place.end as usize]
        };
        assert!(at(0, 0) == row(0, 2) && at(0, 2) == row(0, 2) && at(0, 1) == row(0, 0));
        let step = 48 * 8 * 4;
        assert!(at(1, 0) == &row(3, 1)[5 * step..17 * step] && at(1, 1) == &row(3, 0)[..step]);
        let tokens = row(0, 2).len() + row(0, 0).len();
        assert_eq!(plan.wanted_bytes(), (tokens + 13 * step) as u64);
        if let Some(bulk) = plan.bulk() {
            let bytes = &remote[bulk.remote as usize..(bulk.remote + bulk.len) as usize];
            let place = plan.bulk_place(1, 0).unwrap();
            let cut = &bytes[place.start as usize..place.end as usize];
            assert!(cut == &row(3, 1)[5 * step..17 * step]);
        }
    }
    let all: Vec<u64> = (0..payload.rows() as u64).collect();
    let every = [ReadRequest { field: &tokens, rows: &all, steps: None }];
    let plan = read_plan(&every, ReadLimits::default()).unwrap();
    assert_eq!(plan.fragments().len(), 1, "neighbours are merged");
    let odd: Vec<u64> = (0..payload.rows() as u64).step_by(2).collect();
    let odd = [ReadRequest { field: &tokens, rows: &odd, steps: None }];
    let limits = ReadLimits { merge_gap: 0, bulk_part: 0.1, ..ReadLimits::default() };
    let plan = read_plan(&odd, limits).unwrap();
    assert!(plan.bulk().is_some() || plan.fragments().len() == 1);
    // Refusals.
    let beyond = [ReadRequest { field: &tokens, rows: &[1 << 40], steps: None }];
    assert!(read_plan(&beyond, limits).is_err());
    let long = vec![0..1 << 40; 1];
    let long = [ReadRequest { field: &experts, rows: &[0], steps: Some(&long) }];
    assert!(read_plan(&long, limits).is_err());
}

#[test]
fn one_field_is_read_alone() {
    let payload = Payload::new(Profile::Text, 1 << 20);
    let rollout = payload.rollout();
    let (header, data) = encode(&rollout, &Options::default(), 1);
    let header = Header::parse(&header).unwrap();
    let range = header.field_range("loss_masks").unwrap();
    let part = data.slice(range.start as usize..range.end as usize).unwrap();
    let view = RolloutView::of_parts(header, vec![(range.start, part)]).unwrap();
    view.verify(1).unwrap();
    let masks = view.ragged("loss_masks").unwrap();
    assert!(masks.row(1).unwrap().bytes() == &*payload.fields()[1].rows[1]);
    assert_eq!(view.column("tokens").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(view.column("nothing").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn names_may_be_anything() {
    let mut rollout = Rollout::default();
    for name in ["a/b", "a.b", "\u{1}\n", "数", "", "\"\\"] {
        let column = Column::Ragged(Ragged::from_rows(RowKind::List, [&[1u8][..]]));
        rollout.non_tensor.insert(name.into(), column);
        rollout.meta.insert(name.into(), Value::Str(name.into()));
    }
    let (header, data) = encode(&rollout, &Options::default(), 1);
    assert!(same_rollout(&rollout, &view(&header, data).rollout().unwrap()));
}

#[test]
fn arrays_in_meta_are_refused_with_a_remedy() {
    let meta = transport_core::TensorMeta::new(Dtype::Int8, [1]).unwrap();
    let array = rollout_codec::Array::new(Library::Numpy, meta, vec![1]).unwrap();
    let mut rollout = Rollout::default();
    rollout.meta.insert("x".into(), Value::Array(array));
    let error = Plan::new(&rollout, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("remedy") || error.to_string().contains("columns"));
    assert_eq!(error.context("field"), Some("x"));
}

#[test]
fn a_wrong_destination_or_a_wrong_source_is_refused() {
    let payload = Payload::new(Profile::Text, 1 << 20);
    let rollout = payload.rollout();
    let plan = Plan::new(&rollout, &Options::default()).unwrap();
    let mut small = vec![0; plan.data_bytes() as usize - 64];
    assert!(plan.encode_into(&mut small, 1).is_err());
    let (header, data) = plan.encode(1).unwrap();
    let header = Header::parse(&header).unwrap();
    let cut = data.slice(0..data.len() - 64).unwrap();
    assert_eq!(RolloutView::new(header, cut).unwrap_err().kind(), ErrorKind::ShortRead);
}
