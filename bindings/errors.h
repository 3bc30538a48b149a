// Engine errors become the classes of sharpwave.errors, by kind.
#pragma once

#include "base/error.h"
#include "numpy_api.h"

// Sets the Python error for `error`; the caller returns its failure value.
void set_python_error(const sharpwave::Error& error);
