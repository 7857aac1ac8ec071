// EMU_KERNEL(number, kernel<template, arguments>): exports a kernel under its name expression, with its signature.
#pragma once

#include "../../../signature.h"

namespace emu {

template <class Function, Function function> struct Trampoline;
template <class... P, void (*function)(P...)> struct Trampoline<void (*)(P...), function> {
    static constexpr kbench::Signature<void (*)(P...)> signature{};

    static void call(void** parameters) { call_with(parameters, std::make_integer_sequence<int, sizeof...(P)>{}); }

private:
    template <int... i> static void call_with([[maybe_unused]] void** parameters, std::integer_sequence<int, i...>) {
        function(*static_cast<std::remove_cv_t<std::remove_reference_t<P>>*>(parameters[i])...);
    }
};

}  // namespace emu

// The pointer is a variable first: that takes a plain name, a template-id and a cast that picks an overload alike.
#define EMU_KERNEL(number, ...)                                                                    \
    static constexpr auto emu_function_##number = __VA_ARGS__;                                     \
    extern "C" {                                                                                   \
    __attribute__((visibility("default"))) emu::Kernel emu_kernel_##number = {                     \
        #__VA_ARGS__, emu::Trampoline<decltype(+emu_function_##number), emu_function_##number>::call, \
        emu::Trampoline<decltype(+emu_function_##number), emu_function_##number>::signature.text}; \
    }
