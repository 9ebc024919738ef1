"""Refused fields of the schema, and fields without meaning in caffepy, each with the reason.

All other fields of `proto/caffe.proto` have an effect; `tests/unit/formats/field_proofs.txt` names each one's test.
`docs/reference/fields.md` lists all fields.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.ignore import ALL, ignored_fields, tell_ignored
from caffepy.formats.messages import schema_name, walk_fields
from caffepy.formats.proto.schemas import ForkSchema, fork_schema

log = logging.getLogger(__name__)

# Reason -> fields, as Message.field.
_REFUSED = {
    "TRT is a layer of NVIDIA Caffe that caffepy does not have": (
        "LayerParameter.trt_param TRTParameter.trt_mode TRTParameter.top_k TRTParameter.deploy TRTParameter.model "
        "TRTParameter.deploy_outputs TRTParameter.calibrator"
    ),
    "DenseCRF is a layer of DeepLab and PSPNet that caffepy does not have": (
        "LayerParameter.dense_crf_param DenseCRFParameter.max_iter DenseCRFParameter.pos_xy_std "
        "DenseCRFParameter.pos_w DenseCRFParameter.bi_xy_std DenseCRFParameter.bi_rgb_std DenseCRFParameter.bi_w "
        "DenseCRFParameter.output_probability"
    ),
    "caffepy opens no windows; leave it out": "TransformationParameter.display",
    "trees of classes are not supported; leave it out and give each class its own channel": (
        "RegionLossParameter.softmax_tree"
    ),
    "no layer of a public Caffe computes LINEAR; leave it out": "FocalLossParameter.type",
    "data layers do not know the number of iterations; leave it out": ("AnnotatedDataParameter.difficult_label_warmup"),
    "caffepy adds no zeros around images; give the first convolution a pad": "TransformationParameter.pad",
    "visualize is not supported; leave it out and draw the boxes that the top holds": (
        "DetectionOutputParameter.visualize"
    ),
    "caffepy opens no windows and writes no images; leave it out": (
        "ImageDataParameter.show_data VideoDataParameter.show_data CPMTransformationParameter.visualize"
    ),
    "crop_size_x and crop_size_y are the sizes; leave it out": "CPMTransformationParameter.crop_size",
    "ConvLSTM gives no blobs of single time steps; leave it out and slice the top": "LSTMDebugParameter.expose",
    "the maps of distances are not supported; leave it out": "OPTransformationParameter.add_distance",
    "the person's center stays; leave it out": "OPTransformationParameter.center_swap_prob",
}
_LOGGED = {
    "caffepy chooses the implementation; engines differ only in rounding": "NetParameter.engine LayerParameter.engine",
    "arithmetic is always in single precision, which is more exact than 8 bits": "LayerParameter.quantization_param",
    "caffepy divides the work among devices by itself; --devices and --hosts say which": "NetParameter.multinode",
    "algorithms are timed on the device and differ only in rounding": "ConvolutionParameter.conv_algorithm",
    "caffepy limits the workspaces of convolutions by the memory that is free": "NetParameter.richness",
}
"""Fields of nets for Intel Caffe and other forks without meaning, which `log_ignored_fields` names."""
_NO_MEANING = {
    "caffe-windows declares it and never reads it, or reads it where it cannot act": (
        "LabelSpecificAddParameter.transform_test InnerDistanceParameter.bias_term InnerDistanceParameter.bias_filler "
        "InnerDistanceParameter.transpose ChannelScaleParameter.init_global_scale GeneralContrastiveParameter.square "
        "LabelSpecificRescaleParameter.positive_lower_bound LabelSpecificRescaleParameter.negative_upper_bound"
    ),
    "caffepy limits the workspaces of convolutions by the memory that is free": "SolverParameter.richness",
    "caffepy finds the devices of a host by itself": "SolverParameter.group_id",
    "it names Intel's library": "SolverParameter.engine",
    "Intel Caffe sets it at run time; caffepy's solver always makes the update": "SolverParameter.disabled_update",
    "FlowNet 2 declares it and does not read it": (
        "CorrelationParameter.do_abs ResampleParameter.factor AugmentationParameter.write_mean"
    ),
    "the layers have a bottom, whose first axis it is": "AugmentationParameter.num",
    "shapes follow the bottoms in each pass": "LayerParameter.reshape_every_iter",
    "snapshots always have the format that both Caffes read": "SolverParameter.store_blobs_in_old_format",
    "parameters and history are always single precision; the log says so": "SolverParameter.solver_data_type",
    "arithmetic is always in single precision, which is more exact": (
        "NetParameter.default_forward_math NetParameter.default_backward_math LayerParameter.forward_math "
        "LayerParameter.backward_math"
    ),
    "algorithms are timed on the device and differ only in rounding": (
        "NetParameter.default_conv_algos_override NetParameter.default_cudnn_math_override "
        "LayerParameter.cudnn_math_override ConvolutionParameter.cudnn_convolution_algo_seeker "
        "ConvolutionParameter.conv_algos_override"
    ),
    "gradients share memory wherever no result changes": "NetParameter.eltwise_mem_sharing",
    "the net sets it": "LayerParameter.phase",
    "the debugging output of this field has no definition; debug_info of the net prints every layer": (
        "LayerParameter.debug"
    ),
    "its only field is the engine": (
        "LayerParameter.sigmoid_param LayerParameter.tanh_param V1LayerParameter.tanh_param "
        "V1LayerParameter.sigmoid_param"
    ),
    "caffepy chooses where transformations run; no result changes": "TransformationParameter.use_gpu_transform",
    "layers see N, C, H, W; each backend chooses its memory layout": ("TransformationParameter.forward_packing"),
    "NVIDIA Caffe declares it and never reads it": (
        "TransformationParameter.num_labels PoolingParameter.torch_pooling ResizeParameter.prob NoiseParameter.prob"
    ),
    "both Caffes have it and do not read it; the log names transform_param's force_color": (
        "DataParameter.force_encoded_color"
    ),
    "the prefetch depth changes no result": "DataParameter.prefetch",
    "the number of threads changes no result; --threads sets it": (
        "DataParameter.threads DataParameter.parser_threads ImageDataParameter.threads"
    ),
    "the operating system's page cache does this; no result changes": (
        "DataParameter.cache DataParameter.precache ImageDataParameter.cache ImageDataParameter.precache "
        "WindowDataParameter.cache_images ImageGtDataParameter.cache_images DetectionDataParameter.cache_images"
    ),
    "MS-CNN and Cascade R-CNN declare it and never read it": (
        "ImageGtDataParameter.mean_file ImageGtDataParameter.mirror DetectionDataParameter.scale "
        "DetectionDataParameter.resize_param EvalDataParameter.scale"
    ),
    "moved to transform_param when an old net is read; the log says where it has no effect": (
        "DataParameter.scale DataParameter.mean_file DataParameter.crop_size DataParameter.mirror "
        "ImageDataParameter.scale ImageDataParameter.mean_file ImageDataParameter.crop_size "
        "ImageDataParameter.mirror"
    ),
    "NVIDIA Caffe keeps the name and never reads the file": "AnnotatedDataParameter.label_map_file",
    "caffepy chooses the algorithm; engines differ only in rounding": (
        "ConvolutionParameter.engine PoolingParameter.engine LRNParameter.engine BatchNormParameter.engine "
        "DropoutParameter.engine ReLUParameter.engine SigmoidParameter.engine TanHParameter.engine "
        "SoftmaxParameter.engine SPPParameter.engine BNParameter.engine ConcatParameter.engine EltwiseParameter.engine "
        "InnerProductParameter.engine UnpoolingParameter.engine PoolingNDParameter.engine"
    ),
    "it says how Intel Caffe quantises; arithmetic is always in single precision": (
        "QuantizationParameter.precision QuantizationParameter.rounding_scheme QuantizationParameter.bw_layer_in "
        "QuantizationParameter.bw_layer_out QuantizationParameter.bw_params QuantizationParameter.fl_layer_in "
        "QuantizationParameter.fl_layer_out QuantizationParameter.fl_params QuantizationParameter.scale_in "
        "QuantizationParameter.scale_out QuantizationParameter.scale_params QuantizationParameter.is_negative_input "
        "QuantizationParameter.force_u8_input"
    ),
    "it says how Intel's nodes divide the work": (
        "MultinodeParameter.model_parallel MultinodeParameter.compress_layer_type_list "
        "MnModelParallelParameter.layer_from MnModelParallelParameter.layer_to MnModelParallelParameter.num_nodes "
        "MnModelParallelParameter.model_parts MnParamGradCompressLayerTypeList.layer_type"
    ),
    "the Caffes of CRF as RNN declare it and do not read it; its only value is the default": (
        "MultiStageMeanfieldParameter.compatibility_mode"
    ),
    "the Caffes of CRF as RNN declare it and do not read it": (
        "MultiStageMeanfieldParameter.threshold MultiStageMeanfieldParameter.forced_spatial_filter_weight "
        "MultiStageMeanfieldParameter.forced_bilateral_filter_weight"
    ),
    "SegNet declares it and never reads it": "DenseImageDataParameter.mean_file",
    "caffe_ocr does not read it: the kernels are 3 x 3, and the channels are the bottom's": (
        "DenseBlockParameter.initChannel DenseBlockParameter.pad_h DenseBlockParameter.pad_w "
        "DenseBlockParameter.conv_verticalStride DenseBlockParameter.conv_horizentalStride "
        "DenseBlockParameter.filter_H DenseBlockParameter.filter_W"
    ),
    "caffepy chooses devices, and what they keep, by itself": (
        "DenseBlockParameter.gpuIdx DenseBlockParameter.BC_ultra_space_efficient DenseBlockParameter.workspace_MB"
    ),
    "PSPNet declares it and never reads it; the top has all three": "SegAccuracyParameter.metric",
    "it chooses an algorithm; no result changes": "ConvolutionParameter.force_nd_im2col",
    "neither Caffe reads it; use_difficult_gt decides": "MultiBoxLossParameter.ignore_difficult_gt",
    "it concerns boxes drawn by visualize, which is refused": (
        "DetectionOutputParameter.visualize_threshold DetectionOutputParameter.save_file"
    ),
    "the layer takes the grid's size from its bottom": (
        "RegionLossParameter.side YoloDetectionOutputParameter.side Yolov3Parameter.side DetectionOutputParameter.side"
    ),
    "the forks' layers do not read it": (
        "RegionLossParameter.softmax RegionLossParameter.jitter RegionLossParameter.absolute "
        "RegionLossParameter.random Yolov3Parameter.noobject_scale YoloDetectionOutputParameter.label_map_file "
        "YoloSegParameter.num_class YoloSegParameter.class_scale YoloSegParameter.use_logic_gradient "
        "YoloSegParameter.use_hardsigmoid SegmentationEvaluateParameter.num_classes FocalLossParameter.beta "
        "RegionParameter.anchors"
    ),
    "it concerns masks of AnnotatedData, which caffepy does not read": (
        "AnnotatedDataParameter.single_class AnnotatedDataParameter.seg_scales "
        "AnnotatedDataParameter.seg_resize_width AnnotatedDataParameter.seg_resize_height"
    ),
    "coverage has one type": "DetectNetGroundTruthParameter.coverage_type",
    "DetectNetTransformation of NVIDIA Caffe does not read it": (
        "DetectNetAugmentationParameter.resize_param DetectNetAugmentationParameter.noise_param "
        "DetectNetAugmentationParameter.emit_constraint DetectNetAugmentationParameter.distort_param "
        "DetectNetAugmentationParameter.expand_param"
    ),
    "nothing reads gradients from a snapshot": (
        "BlobProto.diff BlobProto.double_diff BlobProto.raw_diff_type BlobProto.raw_diff"
    ),
    "no layer or tool reads a vector of blobs": "BlobProtoVector.blobs",
    "NVIDIA Caffe's reader sets it at run time": "Datum.record_id AnnotatedDatum.record_id",
    "the content of a record shows its type": "AnnotatedDatum.type",
    "files may hold it, and no layer reads it": ("NormalizedBBox.label NormalizedBBox.score NormalizedBBox.size"),
    "a format of Caffe2, which no layer reads": (
        "C2TensorProto.dims C2TensorProto.data_type C2TensorProto.float_data C2TensorProto.int32_data "
        "C2TensorProto.byte_data C2TensorProto.string_data C2TensorProto.name C2TensorProto.double_data "
        "C2TensorProto.int64_data C2TensorProtos.protos"
    ),
    "it divides the filters among matrix products; no result changes": (
        "ConvolutionParameter.filter_group Convolution3DParameter.filter_group"
    ),
    "C3D declares it and never reads it": "Convolution3DParameter.group VideoDataParameter.is_color",
    "moved to transform_param when an old net of C3D is read": "ImageDataParameter.mean_value",
    "moved to video_data_param when an old net of C3D is read": (
        "ImageDataParameter.new_length ImageDataParameter.use_image ImageDataParameter.sampling_rate "
        "ImageDataParameter.use_temporal_jitter"
    ),
    "transform_param has it; C3D and TSN do not read it": (
        "VideoDataParameter.scale VideoDataParameter.mean_file VideoDataParameter.crop_size VideoDataParameter.mirror"
    ),
    "the images' files say it": "VideoDataParameter.encoded",
    "CMU's Caffe declares it and never uses it in CPMData": (
        "CPMTransformationParameter.scale CPMTransformationParameter.mirror CPMTransformationParameter.mean_file "
        "CPMTransformationParameter.mean_value CPMTransformationParameter.scale_cvg "
        "CPMTransformationParameter.max_cvg_len CPMTransformationParameter.min_cvg_len "
        "CPMTransformationParameter.opaque_coverage CPMTransformationParameter.coverage "
        "CPMTransformationParameter.bbox_norm_factor CPMTransformationParameter.img_header "
        "CPMTransformationParameter.force_color CPMTransformationParameter.force_gray "
        "CPMTransformationParameter.sigma_center"
    ),
    "it concerns aug_way: 'table', which is refused": "CPMTransformationParameter.num_total_augs",
    "OpenPose declares it and never uses it in OPData": (
        "OPTransformationParameter.input_type OPTransformationParameter.frame_size "
        "OPTransformationParameter.taf_topology"
    ),
    "neither Caffe reads it, and no layer of the old format had it": (
        "V0LayerParameter.new_num V0LayerParameter.new_channels"
    ),
}

REFUSED = {field: reason for reason, fields in _REFUSED.items() for field in fields.split()}
"""Fields that raise an error when set, with the reason."""
LOGGED = {field: reason for reason, fields in _LOGGED.items() for field in fields.split()}
NO_MEANING = {field: reason for reason, fields in _NO_MEANING.items() for field in fields.split()} | LOGGED
"""Fields that are accepted and do not change results, with the reason."""


def log_ignored_fields(param: Message, origin: str) -> None:
    """Log one line for each of the fields of `LOGGED` that a net has."""
    found = {f"{schema_name(owner.DESCRIPTOR)}.{field.name}" for owner, field, _, _ in walk_fields(param)}
    for name in sorted(found & set(LOGGED)):
        log.info("%s: %s has no effect: %s", origin, name, LOGGED[name])


def refuse_fields(param: Message, where: str) -> None:
    """Refuse fields of `REFUSED` whose value is not their default.

    Args:
        param: net, layer or solver.
        where: prefix of the error message.

    Raises:
        ConfigError: `param` contains a refused field; the message has field and reason.
    """
    for owner, field, value, _ in walk_fields(param):
        message = schema_name(owner.DESCRIPTOR)
        reason = REFUSED.get(f"{message}.{field.name}")
        if reason is not None and (field.message_type is not None or value != field.default_value):
            raise ConfigError(f"{where}: {field.name} of {message} is refused: {reason}")


def refuse_fork_fields(param: Message, where: str, advice: str, skipped: Container[str] = ()) -> None:
    """Refuse fields that only the registered schema of a fork has, unless they are their default, and such values.

    Args:
        param: net, layer or solver.
        where: prefix of the error message.
        advice: what to do instead.
        skipped: fields of `param` that are not entered.

    Raises:
        ConfigError: `param` contains such a field or value; the message names it.
    """
    schema = fork_schema()
    if schema is None:
        return
    for field, value in param.ListFields():
        if field.name in skipped:
            continue
        name = f"{schema_name(param.DESCRIPTOR)}.{field.name}"
        if name in schema.fields and (field.message_type is not None or value != field.default_value):
            if name in schema.deprecated or ALL in ignored_fields():
                tell_ignored(f"{where}: {name} of {schema.path.name}", "")
                continue
            raise ConfigError(
                f"{where}: {field.name} of {schema_name(param.DESCRIPTOR)} is a field of {schema.path.name} that "
                f"caffepy does not know; {advice}; if results do not depend on it, --ignore-fields {name}"
            )
        repeated = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        for part in value if repeated else [value]:
            if field.message_type is not None:
                refuse_fork_fields(part, where, advice)
            elif field.enum_type is not None:
                _refuse_fork_value(schema, field, part, where, advice)


def _refuse_fork_value(schema: ForkSchema, field: FieldDescriptor, number: int, where: str, advice: str) -> None:
    enum: Any = field.enum_type
    value = enum.values_by_number[number].name
    if f"{schema_name(enum)}.{value}" in schema.values:
        raise ConfigError(
            f"{where}: {value}, the value of {field.name}, is of {schema.path.name}, and caffepy does not know it; "
            f"{advice}"
        )
